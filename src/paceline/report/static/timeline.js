// The timeline: a row per worker, time to the right. Zoomed in, it shows every interval; zoomed out, shares per bucket.
"use strict";

const VERSIONS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
const PASSES = { forward: "#0072B2", backward: "#009E73" };
const ON_VERSIONS = ["#ffffff", "#14171b", "#ffffff", "#14171b", "#14171b", "#ffffff"];
const LEFT = 92, ROW = 34, GAP = 8, TOP = 22;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size >= 100) return seconds.toFixed(0) + " s";
  if (size >= 1) return seconds.toPrecision(3) + " s";
  if (size >= 1e-3) return (seconds * 1e3).toPrecision(3) + " ms";
  return (seconds * 1e6).toFixed(0) + " µs";
}

function ticks(from, to, most) {
  const raw = (to - from) / most;
  const ten = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= raw);
  const list = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) list.push(n * step);
  return [list, step];
}

class Timeline {
  constructor(box, data, options = {}) {
    this.box = box;
    this.follow = options.follow || 0;
    box.innerHTML = "";
    const bar = document.createElement("div");
    bar.className = "bar";
    this.bar = bar;
    this.button("typical updates", () => this.show(...this.data.typical));
    this.button("whole run", () => this.show(0, this.data.seconds));
    this.slow = this.button("slowest step", () => this.showSlowest());
    this.button("+", () => this.zoom(0.5), "zoom in");
    this.button("−", () => this.zoom(2), "zoom out");
    if (this.follow) this.button("follow", () => { this.following = true; this.update(this.data); });
    this.words = document.createElement("span");
    this.words.className = "small soft";
    bar.append(this.words);
    this.strip = document.createElement("canvas");
    this.strip.className = "strip";
    this.strip.setAttribute("aria-label", "the whole run; drag to choose what is shown");
    this.canvas = document.createElement("canvas");
    this.canvas.className = "main";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    box.append(bar, this.strip, this.canvas, this.legend);
    this.turn = 0;
    this.following = this.follow > 0;
    this.update(data);
    this.listen();
  }

  button(words, action, title) {
    const button = document.createElement("button");
    button.textContent = words;
    button.title = title || words;
    button.addEventListener("click", () => { if (words !== "follow") this.following = false; action(); });
    this.bar.append(button);
    return button;
  }

  update(data) {
    this.data = data;
    this.pieces = data.pieces.map((piece) => ({ ...piece, lanes: new Map(Object.entries(piece.lanes)) }));
    this.slow.hidden = !data.slowest.length;
    if (this.following) this.view = [Math.max(0, data.seconds - this.follow), Math.max(data.seconds, 1e-3)];
    else if (!this.view) this.view = [...data.typical];
    this.legends();
    this.canvas.setAttribute("aria-label", this.describe());
    this.draw();
  }

  legends() {
    const names = this.data.kinds.filter((kind) => kind !== "computing" && kind !== "waiting");
    const versions = VERSIONS.map((c, i) => `${c} ${i * 17}% ${(i + 1) * 17}%`).join(",");
    this.legend.innerHTML =
      (this.data.passes
        ? Object.entries(PASSES).map(([name, colour]) => `<span><i style="background:${colour}"></i>${name}</span>`).join("")
        : `<span><i style="background:linear-gradient(90deg,${versions})"></i>computing, a colour per version (from afar: blue)</span>`) +
      names.map((kind) => `<span><i style="background:var(--${kind})"></i>${kind}</span>`).join("") +
      `<span><i style="background:var(--waiting)"></i>waiting</span><span><i style="background:var(--track)"></i>not training</span>` +
      `<span>│ an update</span>` + (this.data.slowest.length ? "<span>▾ an unusually slow step</span>" : "");
  }

  // One worker, whose row stays bright; null for all.
  choose(rank) {
    this.chosen = rank;
    this.draw();
  }

  // The timeline in words, for those who cannot see it.
  describe() {
    const { lanes, kinds, seconds } = this.data;
    const told = lanes.map((lane) => {
      const sums = lane.buckets.map((list) => list.reduce((a, b) => a + b, 0) / 1000 / (list.length || 1));
      const parts = kinds.map((kind, n) => [kind, sums[n]]).filter(([, part]) => part > 0.005).map(([kind, part]) => `${kind} ${(100 * part).toFixed(0)} %`);
      return `${lane.rank < 0 ? "server" : "worker " + lane.rank}: ${parts.join(", ")}`;
    });
    return `Timeline of ${duration(seconds)}. ${told.join("; ")}. Plus and minus zoom, arrow keys move, Home shows the whole run.`;
  }

  show(from, to) {
    const whole = Math.max(this.data.seconds, 1e-6);
    const length = Math.min(Math.max(to - from, 2e-5), whole * 1.02);
    const start = Math.min(Math.max(from, -whole * 0.01), whole * 1.01 - length);
    this.view = [start, start + length];
    this.draw();
  }

  zoom(factor, around) {
    const [from, to] = this.view;
    const middle = around === undefined ? (from + to) / 2 : around;
    this.show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  showSlowest() {
    const [, start, seconds] = this.data.slowest[this.turn++ % this.data.slowest.length];
    this.show(start - 2 * seconds, start + 3 * seconds);
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  prepare(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(200, this.box.clientWidth);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "13px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return [pen, width];
  }

  draw() {
    if (!this.box.clientWidth) return;
    this.drawn = (this.drawn || 0) + 1;
    this.colours = Object.fromEntries(["ink", "soft", "line", "track", "paper", ...this.data.kinds].map((n) => [n, css(n)]));
    this.drawStrip();
    const { lanes } = this.data;
    const height = TOP + lanes.length * (ROW + GAP) + 26;
    const [pen, width] = this.prepare(this.canvas, height);
    this.width = width - 8;
    const [from, to] = this.view;
    const scale = (this.width - LEFT) / (to - from);
    this.at = (moment) => LEFT + (moment - from) * scale;
    this.y = (index) => TOP + index * (ROW + GAP);
    lanes.forEach((lane, index) => {
      pen.fillStyle = this.colours.ink;
      pen.textAlign = "right";
      pen.fillText(lane.rank < 0 ? (lane.rank === -1 ? "server" : `server ${-lane.rank}`) : `worker ${lane.rank}`, LEFT - 10, this.y(index) + ROW / 2);
      pen.fillStyle = this.colours.track;
      pen.fillRect(LEFT, this.y(index), this.width - LEFT, ROW);
    });
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width - LEFT, height - 20);
    pen.clip();
    this.hits = [];
    this.arrows = 0;
    const seen = this.pieces.filter((piece) => piece.end >= from && piece.begin <= to);
    const count = seen.reduce((sum, piece) => sum + this.within(piece, from, to), 0);
    this.close = count <= 3 * this.width && seen.length > 0;
    const covered = this.close ? seen.map((piece) => [piece.begin, piece.end]) : [];
    this.drawBuckets(pen, from, to, covered);
    if (this.close) for (const piece of seen) this.drawPiece(pen, piece, from, to, count);
    this.drawMarks(pen, from, to);
    if (this.chosen !== null && this.chosen !== undefined) {
      pen.fillStyle = this.colours.paper;
      pen.globalAlpha = 0.72;
      lanes.forEach((lane, index) => { if (lane.rank !== this.chosen) pen.fillRect(LEFT, this.y(index) - 7, this.width - LEFT, ROW + 9); });
      pen.globalAlpha = 1;
    }
    pen.restore();
    this.drawAxis(pen, from, to, height);
    const gaps = this.close || this.data.whole ? "" : " · shares of time, summed up: zoom in for single steps";
    this.words.textContent = duration(to - from) + " shown of " + duration(this.data.seconds) + gaps;
  }

  within(piece, from, to) {
    let count = 0;
    for (const lane of piece.lanes.values()) {
      const low = this.find(lane.start, (from - piece.begin) * 1e6), high = this.find(lane.start, (to - piece.begin) * 1e6);
      count += high - low + 1;
    }
    return count;
  }

  find(list, value) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] <= value) low = middle + 1; else high = middle;
    }
    return low;
  }

  drawBuckets(pen, from, to, covered) {
    const { width, lanes, kinds } = this.data;
    if (!lanes.length || !lanes[0].buckets[0].length) return;
    const count = lanes[0].buckets[0].length;
    const first = Math.max(0, Math.floor(from / width)), last = Math.min(count - 1, Math.floor(to / width));
    const group = Math.max(1, Math.ceil((last - first + 1) / (this.width - LEFT)));
    const order = ["computing", "loading", "communicating", "updating", "cancelled", "waiting"].map((kind) => kinds.indexOf(kind));
    for (let begin = first - (first % group); begin <= last; begin += group) {
      const start = begin * width, end = (begin + group) * width;
      if (covered.some(([a, b]) => start >= a - width && end <= b + width)) continue;
      const x = this.at(start), w = Math.max(0.7, this.at(end) - x);
      lanes.forEach((lane, index) => {
        let y = this.y(index) + ROW;
        const shares = {};
        for (const kind of order) {
          let sum = 0;
          for (let n = begin; n < Math.min(begin + group, count); n++) sum += lane.buckets[kind][n];
          const share = Math.min(1, sum / 1000 / group);
          if (!share) continue;
          shares[kinds[kind]] = share;
          const h = share * ROW;
          pen.fillStyle = this.colours[kinds[kind]];
          pen.fillRect(x, Math.max(this.y(index), y - h), w, Math.min(h, y - this.y(index)));
          y -= h;
        }
        this.hits.push([index, x, x + w, () => Object.entries(shares).map(([k, s]) => `${k} ${(100 * s).toFixed(0)} %`).join("\n") + `\nof ${duration(width * group)}`]);
      });
    }
  }

  drawPiece(pen, piece, from, to, count) {
    const { lanes, kinds } = this.data;
    lanes.forEach((lane, index) => {
      const rows = piece.lanes.get(String(lane.rank));
      if (!rows) return;
      const y = this.y(index);
      // An interval that began before the view may extend into it.
      const low = Math.max(0, this.find(rows.start, (from - piece.begin) * 1e6) - 12);
      const high = this.find(rows.start, (to - piece.begin) * 1e6);
      for (let n = low; n < high; n++) {
        const start = piece.begin + rows.start[n] / 1e6, seconds = rows.length[n] / 1e6;
        if (start + seconds < from) continue;
        const kind = kinds[rows.kind[n]], x = this.at(start), w = Math.max(0.8, seconds * (this.width - LEFT) / (to - from));
        const version = rows.version[n];
        pen.globalAlpha = 1;
        if (kind === "computing" || kind === "cancelled") {
          const pass = this.data.passes && kind === "computing" ? (rows.forward && rows.forward[n] ? "forward" : "backward") : null;
          pen.fillStyle = pass ? PASSES[pass] : VERSIONS[version % VERSIONS.length];
          if (kind === "cancelled") pen.globalAlpha = 0.28;
          pen.fillRect(x, y, w, ROW);
          pen.globalAlpha = 1;
          if (kind === "cancelled" && w > 3) {
            pen.strokeStyle = pen.fillStyle;
            pen.setLineDash([4, 3]);
            pen.strokeRect(x + 0.5, y + 0.5, w - 1, ROW - 1);
            pen.setLineDash([]);
          }
          if (kind === "computing" && w > 34) {
            pen.fillStyle = ON_VERSIONS[version % VERSIONS.length];
            pen.textAlign = "center";
            pen.fillText(pass ? pass[0].toUpperCase() : String(version), x + w / 2, y + ROW / 2);
          }
          if (kind === "computing" && !pass && rows.forward && rows.forward[n] && w > 16) {
            pen.fillStyle = "rgba(255,255,255,.75)";
            pen.fillRect(this.at(start + rows.forward[n] / 1e6), y + ROW - 6, 1, 6);
          }
        } else if (kind === "waiting") {
          pen.fillStyle = this.colours.waiting;
          pen.fillRect(x, y, w, ROW);
          if (w > 3) { pen.strokeStyle = this.colours.line; pen.strokeRect(x + 0.5, y + 0.5, w - 1, ROW - 1); }
        } else {
          pen.fillStyle = this.colours[kind];
          pen.fillRect(x, y + ROW / 4, w, ROW / 2);
        }
        if (w > 1.5) this.hits.push([index, x, x + w, () => this.describe(lane, rows, n, kind, seconds)]);
      }
    });
    pen.strokeStyle = this.colours.ink;
    if (piece.updates.length * 4 < this.width) {
      pen.globalAlpha = 0.4;
      for (const moment of piece.updates) {
        const x = Math.round(this.at(piece.begin + moment / 1e6)) + 0.5;
        pen.beginPath();
        pen.moveTo(x, TOP - 6);
        pen.lineTo(x, this.y(lanes.length) - GAP);
        pen.stroke();
      }
      pen.globalAlpha = 1;
    }
    if (count < this.width / 4) this.drawArrows(pen, piece, from, to);
  }

  describe(lane, rows, n, kind, seconds) {
    const words = [`${kind}: ${duration(seconds)}`];
    if (kind === "computing") {
      words.push(`on version ${rows.version[n]}`);
      if (this.data.passes) words.push(rows.forward && rows.forward[n] ? "a forward pass of a microbatch" : "a backward pass of a microbatch");
      else if (rows.forward && rows.forward[n]) words.push(`forward ${duration(rows.forward[n] / 1e6)}, then backward`);
    }
    if (kind === "cancelled") words.push(`on version ${rows.version[n]}`);
    if (kind === "updating") words.push(`makes version ${rows.version[n]}`);
    if (kind === "waiting" && rows.on) words.push(`for worker ${rows.on[n]}`);
    return words.join("\n");
  }

  drawArrows(pen, piece, from, to) {
    const server = this.data.lanes.findIndex((lane) => lane.rank === -1);
    if (server < 0) return;
    for (const [rank, sent, arrived, answered, got, used] of piece.arrows) {
      const index = this.data.lanes.findIndex((lane) => lane.rank === rank);
      const moments = [sent, arrived, answered, got].map((moment) => this.at(piece.begin + moment / 1e6));
      if (index < 0 || moments[3] < LEFT || moments[0] > this.width) continue;
      const low = this.y(index) + ROW, deep = this.y(server);
      this.arrow(pen, moments[0], low, moments[1], deep, used ? this.colours.ink : this.colours.soft, !used);
      this.arrow(pen, moments[2], deep, moments[3], low, this.colours.soft, false);
      this.arrows += 2;
    }
  }

  arrow(pen, x1, y1, x2, y2, colour, dashed) {
    pen.strokeStyle = pen.fillStyle = colour;
    pen.globalAlpha = 0.75;
    pen.setLineDash(dashed ? [3, 3] : []);
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
    pen.setLineDash([]);
    const angle = Math.atan2(y2 - y1, x2 - x1);
    pen.beginPath();
    pen.moveTo(x2, y2);
    pen.lineTo(x2 - 7 * Math.cos(angle - 0.4), y2 - 7 * Math.sin(angle - 0.4));
    pen.lineTo(x2 - 7 * Math.cos(angle + 0.4), y2 - 7 * Math.sin(angle + 0.4));
    pen.fill();
    pen.globalAlpha = 1;
  }

  drawMarks(pen, from, to) {
    pen.fillStyle = this.colours.ink;
    pen.textAlign = "center";
    for (const [rank, start, seconds, times] of this.data.slowest) {
      if (start + seconds < from || start > to) continue;
      const index = this.data.lanes.findIndex((lane) => lane.rank === rank);
      const x = this.at(start + seconds / 2), y = this.y(index);
      pen.beginPath();
      pen.moveTo(x - 4, y - 6);
      pen.lineTo(x + 4, y - 6);
      pen.lineTo(x, y + 1);
      pen.fill();
      this.hits.push([index, x - 5, x + 5, () => `a slow step: ${duration(seconds)}\n${times} times the usual`, true]);
    }
  }

  drawAxis(pen, from, to, height) {
    const [list, step] = ticks(from, to, Math.max(3, this.width / 110));
    pen.fillStyle = this.colours.soft;
    pen.textAlign = "center";
    const unit = step >= 0.1 ? [1, " s"] : step >= 1e-4 ? [1e3, " ms"] : [1e6, " µs"];
    const digits = Math.max(0, -Math.floor(Math.log10(step * unit[0]) + 1e-9));
    let right = -Infinity;
    for (const moment of list) {
      const x = this.at(moment);
      if (x < LEFT) continue;
      const words = (moment * unit[0]).toFixed(digits) + unit[1];
      const half = pen.measureText(words).width / 2;
      pen.fillRect(x, height - 24, 1, 4);
      if (x - half < right + 10 || x + half > this.width + 6) continue;
      pen.fillText(words, x, height - 10);
      right = x + half;
    }
  }

  drawStrip() {
    const [pen, width] = this.prepare(this.strip, 34);
    const { lanes, kinds, seconds } = this.data;
    const workers = lanes.filter((lane) => lane.rank >= 0);
    const right = width - 8;
    pen.fillStyle = this.colours.soft;
    pen.textAlign = "right";
    pen.fillText("whole run", LEFT - 10, 15);
    pen.fillStyle = this.colours.track;
    pen.fillRect(LEFT, 2, right - LEFT, 26);
    if (!workers.length || !seconds) return;
    const count = workers[0].buckets[0].length, columns = Math.min(count, Math.floor(right - LEFT));
    for (let c = 0; c < columns; c++) {
      const begin = Math.floor(c * count / columns), end = Math.max(begin + 1, Math.floor((c + 1) * count / columns));
      let y = 28;
      for (const name of ["computing", "loading", "communicating", "updating", "cancelled"]) {
        const kind = kinds.indexOf(name);
        let sum = 0;
        for (const lane of workers) for (let n = begin; n < end; n++) sum += lane.buckets[kind][n];
        const h = Math.min(y - 2, 26 * sum / 1000 / (end - begin) / workers.length);
        pen.fillStyle = this.colours[name];
        pen.fillRect(LEFT + (right - LEFT) * c / columns, y - h, (right - LEFT) / columns + 0.4, h);
        y -= h;
      }
    }
    const scale = (right - LEFT) / seconds;
    const [from, to] = this.view;
    pen.strokeStyle = this.colours.ink;
    pen.lineWidth = 2;
    const x = Math.max(LEFT, LEFT + from * scale);
    pen.strokeRect(x, 1, Math.max(3, Math.min(right, LEFT + to * scale) - x), 28);
    pen.lineWidth = 1;
  }

  // -- input ---------------------------------------------------------------------------------------------------------

  listen() {
    const moment = (event) => {
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      return this.view[0] + (x - LEFT) / (this.width - LEFT) * (this.view[1] - this.view[0]);
    };
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.following = false;
      this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), moment(event));
    }, { passive: false });
    let held = null;
    this.canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, ...this.view]; this.following = false; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", () => { held = null; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (held) {
        const shift = (event.clientX - held[0]) / (this.width - LEFT) * (held[2] - held[1]);
        this.show(held[1] - shift, held[2] - shift);
      }
      this.hover(event);
    });
    this.canvas.addEventListener("pointerleave", () => { document.getElementById("tip").hidden = true; });
    this.canvas.addEventListener("dblclick", () => this.show(...this.data.typical));
    this.canvas.addEventListener("keydown", (event) => {
      const [from, to] = this.view, step = (to - from) / 4;
      const acts = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.show(from - step, to - step), ArrowRight: () => this.show(from + step, to + step), Home: () => this.show(0, this.data.seconds) };
      if (acts[event.key]) { event.preventDefault(); this.following = false; acts[event.key](); }
    });
    let dragging = false;
    const place = (event) => {
      const box = this.strip.getBoundingClientRect();
      const middle = (event.clientX - box.left - LEFT) / (this.width - LEFT) * this.data.seconds;
      const half = (this.view[1] - this.view[0]) / 2;
      this.following = false;
      this.show(middle - half, middle + half);
    };
    this.strip.addEventListener("pointerdown", (event) => { dragging = true; this.strip.setPointerCapture(event.pointerId); place(event); });
    this.strip.addEventListener("pointermove", (event) => { if (dragging) place(event); });
    this.strip.addEventListener("pointerup", () => { dragging = false; });
    new ResizeObserver(() => this.draw()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  hover(event) {
    const tip = document.getElementById("tip");
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let words = null;
    for (let n = this.hits.length - 1; n >= 0 && !words; n--) {
      const [index, left, right, tell, mark] = this.hits[n];
      const top = this.y(index) - (mark ? 7 : 0), bottom = this.y(index) + (mark ? 1 : ROW);
      if (x >= left && x <= right && y >= top && y <= bottom) words = tell();
    }
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  }
}

// A part of a timeline from its typical updates on, `length` seconds long, with rows as thin as many workers need.
function drawSmall(canvas, data, length) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (!width) return;
  const row = Math.max(3, Math.min(14, Math.floor(120 / data.lanes.length))), height = data.lanes.length * (row + 1);
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const small = canvas.getContext("2d");
  small.setTransform(ratio, 0, 0, ratio, 0, 0);
  const colours = Object.fromEntries([...data.kinds, "track"].map((name) => [name, css(name)]));
  const from = Math.max(0, Math.min(data.typical[0], data.seconds - length)), scale = width / (length || 1);
  data.lanes.forEach((lane, index) => {
    small.fillStyle = colours.track;
    small.fillRect(0, index * (row + 1), width, row);
    for (const piece of data.pieces) {
      const rows = piece.lanes[lane.rank];
      if (!rows || piece.end < from || piece.begin > from + length) continue;
      for (let n = 0; n < rows.start.length; n++) {
        const x = (piece.begin + rows.start[n] / 1e6 - from) * scale, wide = rows.length[n] / 1e6 * scale;
        if (x + wide < 0 || x > width) continue;
        small.fillStyle = colours[data.kinds[rows.kind[n]]];
        small.fillRect(x, index * (row + 1), Math.max(0.6, wide), row);
      }
    }
  });
}
