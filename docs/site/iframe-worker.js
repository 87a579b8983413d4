// The search of the site runs in a Worker, which browsers do not start for pages of the file system.
// There it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>postMessage = (data) => frameElement.answer(data)</script><script src="${url}"></script>`;
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame = new Promise((resolve) => frame.addEventListener("load", () => resolve(frame.contentWindow)));
      const attach = () => document.body.append(frame);
      document.body ? attach() : document.addEventListener("DOMContentLoaded", attach);
    }

    postMessage(data) {
      this.frame.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.then((inside) => inside.frameElement.remove());
    }
  };
  window.Worker = window.IFrameWorker;
}
