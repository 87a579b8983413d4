// Draws a page from the facts of one or several runs: embedded in a report, streamed to the live page.
"use strict";

const PARTS = ["computing", "loading", "communicating", "updating", "waiting", "cancelled", "elsewhere"];
const DASHES = [null, "7 4", "2 3", "9 3 2 3", "12 5"];
const NAMES = { elsewhere: "not training" };
const share = (value) => value === null || value === undefined ? "–" : (100 * value).toFixed(value < 0.0995 ? 1 : 0) + " %";
const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let n = 0;
  while (value >= 1000 && n < units.length - 1) { value /= 1000; n++; }
  return number(value) + " " + units[n];
};

class Run {
  // level: of the headings of its figures; id: the beginning of the addresses of its sections.
  constructor(live, level = 2, id = "run") {
    this.live = live;
    this.level = level;
    this.head = make("div", { id });
    this.workers = make("div", { className: "card scroll", id: id + "-workers" });
    this.workers.dataset.figure = "workers";
    this.timelineBox = make("div");
    this.timelineCard = make("div", { className: "card", id: id + "-timeline" }, make("h" + level, { textContent: "Timeline" }), this.timelineBox);
    this.timelineCard.dataset.figure = "timeline";
    const plot = (title, about) => new Plot(title, about, level + 1);
    this.time = plot("Where the time goes", "Seconds of each worker.");
    this.blame = plot("Who was waited for", "Seconds that all workers together waited for each worker, by what it did meanwhile.");
    this.pace = plot("Own pace", "Milliseconds per minibatch; waiting for others is taken out.");
    this.throughput = plot("Throughput over time");
    this.throughputByUpdate = plot("Throughput over updates");
    this.metrics = plot("Metrics over time");
    this.byUpdate = plot("Metrics over updates");
    for (const one of [this.metrics, this.byUpdate]) one.offerLog();
    this.staleness = plot("Staleness", "How many gradients were how many versions old when they came.");
    this.traffic = plot("Bytes moved");
    const fold = (title, name, plots) => {
      const folded = make("details", { open: true, id: `${id}-${name}` }, make("summary", {}, make("h" + level, { textContent: title })), make("div", { className: "grid" }, ...plots.map((one) => one.card)));
      folded.className = "fold";
      return folded;
    };
    this.config = make("pre");
    this.sections = [
      this.head, this.timelineCard, this.workers,
      fold("Time of each worker", "time", [this.time, this.blame, this.pace]),
      fold("Course of the training", "course", [this.throughput, this.throughputByUpdate, this.metrics, this.byUpdate]),
      this.counts = fold("Messages", "messages", [this.staleness, this.traffic]),
      make("details", { className: "fold", id: id + "-configuration" }, make("summary", {}, make("h" + level, { textContent: "Configuration" })), this.config),
    ];
    this.plots = [this.time, this.blame, this.pace, this.throughput, this.throughputByUpdate, this.metrics, this.byUpdate, this.staleness, this.traffic];
    for (const section of this.sections) {
      section.classList.add("section");
      if (section.tagName === "DETAILS") section.addEventListener("toggle", () => this.redraw());
    }
    for (const box of [this.workers, this.timelineCard, ...this.sections]) box.addEventListener("click", (event) => {
      const found = event.target.closest("[data-worker]");
      if (found && event.currentTarget.contains(found) && !event.handled) { event.handled = true; this.choose(Number(found.dataset.worker)); }
    });
  }

  contents(id) {
    return [["timeline", "Timeline"], ["workers", "Who is slow"], ["time", "Time of each worker"], ["course", "Course of the training"], ["configuration", "Configuration"]]
      .map(([name, words]) => make("a", { href: `#${id}-${name}`, textContent: words }));
  }

  // After what was folded is opened.
  redraw() {
    if (!this.timeline) return;
    for (const plot of this.plots) if (plot.box.checkVisibility() && plot.width !== plot.box.clientWidth) plot.again();
    this.timeline.draw();
    this.mark();
  }

  // One worker in all figures; the same one again: all workers.
  choose(rank) {
    this.chosen = this.chosen === rank ? null : rank;
    this.timeline.choose(this.chosen);
    this.mark();
  }

  mark() {
    for (const section of this.sections) for (const element of section.querySelectorAll("[data-worker]")) {
      element.classList.toggle("faded", this.chosen !== null && this.chosen !== undefined && Number(element.dataset.worker) !== this.chosen);
      if (element.tagName === "BUTTON") element.setAttribute("aria-pressed", String(Number(element.dataset.worker) === this.chosen));
    }
  }

  update(run) {
    this.drawHead(run);
    this.drawWorkers(run);
    if (run.config.predicted) this.timelineCard.firstChild.textContent = "Timeline (predicted)";
    if (this.timeline) this.timeline.update(run.timeline);
    else this.timeline = new Timeline(this.timelineBox, run.timeline, { follow: this.live ? 10 : 0 });
    this.drawShares(run);
    this.drawCurves(run);
    this.drawCounts(run);
    this.config.textContent = JSON.stringify(run.config, null, 2);
    this.mark();
  }

  drawHead(run) {
    const numbers = [
      ["samples per second", number(run.samples_per_second)],
      ["per update", run.seconds_per_update === null ? "–" : duration(run.seconds_per_update)],
      ["updates", run.updates.toLocaleString("en")],
      ["bubbles (waiting)", share(run.bubbles)],
      ["scaling efficiency", share(run.efficiency)],
      ...(run.bubble ? [["pipeline bubble (formula)", `${share(run.bubble.measured)} (${run.bubble.formula === null ? "–" : share(run.bubble.formula)})`]] : []),
      ...(run.communication ? [[`transfers hidden behind computing${run.communication.partial ? " (where all is recorded)" : ""}`, share(run.communication.hidden)]] : []),
      ["duration", duration(run.seconds)],
      ...(run.startup ? [["start-up, before that", duration(run.startup)]] : []),
      ...(run.served ? [["mean staleness", number(run.staleness.mean)]] : []),
      ...Object.entries(run.last).map(([name, value]) => [name, number(value, 4)]),
    ];
    this.head.replaceChildren(...[
      ...run.notes.map((note) => make("div", { className: "note", textContent: note })),
      make("div", { className: "verdict", textContent: run.verdict.join(" ") }),
      advice(run),
      make("div", { className: "numbers" }, ...numbers.map(([name, value]) => make("div", {}, make("b", { textContent: value }), make("span", { textContent: name })))),
    ].filter(Boolean));
    this.head.querySelector(".numbers").title = "Scaling efficiency: samples per second, as a share of what the same workers would do if each just loaded and computed.";
  }

  drawWorkers(run) {
    const cancelled = run.workers.some((worker) => worker.cancelled);
    const heads = ["worker", ...(this.live ? ["state", "last heard of"] : []), "own pace", "× others", "slowest step", "minibatches", ...(cancelled ? ["cancelled"] : []), ...(run.served ? ["staleness"] : []), "waited for it", "why"];
    const rows = run.workers.map((worker) => {
      const cells = [
        String(worker.rank),
        ...(this.live ? [worker.state, heard(worker, run)] : []),
        worker.pace === null ? "–" : duration(worker.pace),
        worker.ratio.toFixed(2),
        duration(worker.longest),
        worker.minibatches.toLocaleString("en"),
        ...(cancelled ? [worker.cancelled.toLocaleString("en")] : []),
        ...(run.served ? [number(worker.staleness)] : []),
        worker.blame > 0 ? duration(worker.blame) : "–",
      ];
      const name = make("button", { className: "plain", textContent: cells[0], title: "show this worker in all figures" });
      name.dataset.worker = worker.rank;
      name.setAttribute("aria-pressed", "false");
      const head = make("th", {}, name);
      head.scope = "row";
      const row = make("tr", { className: worker.slow ? "slow" : "" }, head, ...cells.slice(1).map((cell) => make("td", { textContent: cell })));
      row.append(make("td", { className: "words", textContent: worker.slow ? because(run, worker) : "" }));
      return row;
    });
    const focused = this.workers.contains(document.activeElement) ? document.activeElement.dataset.worker : undefined;
    this.workers.replaceChildren(make("h" + this.level, { textContent: "Who is slow" }), table(heads, rows, "Pace, steps and blame of each worker"));
    this.workers.querySelector("thead th:last-child").className = "words";
    if (focused !== undefined) this.workers.querySelector(`[data-worker="${focused}"]`)?.focus();
  }

  drawShares(run) {
    const keys = run.workers.map((worker) => "worker " + worker.rank), workers = run.workers.map((worker) => worker.rank);
    const bars = (names, value, colour, unit, words) => names.map((part) => {
      const values = run.workers.map((worker) => value(worker, part));
      return { bars: "across", name: words(part), keys, values, workers, colour: colour(part), edge: part === "waiting" ? css("line") : null, tips: values.map((one, n) => `${keys[n]}: ${number(one, 3)} ${unit}\n${words(part)}`) };
    });
    const told = (about, names, value, unit) => `${about}. ` + run.workers.map((worker) => `worker ${worker.rank}: ` + names.filter((part) => value(worker, part) > 0).map((part) => `${part} ${number(value(worker, part), 3)} ${unit}`).join(", ")).join("; ");
    const seconds = (worker, part) => worker.seconds[part], blame = (worker, cause) => worker.causes[cause], pace = (worker, part) => 1e3 * worker.parts[part];
    const slow = (part) => part === "slowed" ? "--slow" : part;
    this.time.draw(bars(PARTS, seconds, css, "s", (part) => NAMES[part] || part), { x: "seconds", words: told("Seconds of each worker", PARTS, seconds, "s") });
    const causes = { loading: css("loading"), forward: css("computing"), backward: "#56b4e9", slowed: "#d55e00", link: css("communicating"), elsewhere: css("elsewhere") };
    this.blame.card.hidden = !run.workers.some((worker) => worker.blame > 0);
    this.blame.draw(bars(Object.keys(run.causes), blame, (cause) => causes[cause], "s waited", slow), { x: "seconds waited for it", words: told("Seconds waited for each worker", Object.keys(run.causes), blame, "s") });
    const steps = ["loading", "forward", "backward", "slowed", "link"];
    this.pace.draw(bars(steps, pace, (part) => causes[part], "ms", slow), { x: "ms per minibatch", words: told("Own pace", steps, pace, "ms") });
  }

  drawCurves(run) {
    const { throughput, metrics } = run.curves;
    for (const [plot, xs, over] of [[this.throughput, throughput.seconds, "seconds"], [this.throughputByUpdate, throughput.versions, "updates"]]) {
      plot.draw([{ name: "samples/s", xs, ys: throughput.samples, colour: css("computing") }], { x: over, y: "samples per second", zero: true, legend: false, words: `Samples per second over ${over}: ${number(run.samples_per_second)} on average` });
    }
    this.throughputByUpdate.card.hidden = !run.updates;
    const traces = (over) => Object.entries(metrics).map(([name, curve], n) => ({ name, xs: curve[over], ys: curve.values, smooth: true, colour: runColour(n), dash: DASHES[n % DASHES.length] }));
    const words = Object.entries(run.last).map(([name, value]) => `${name} ended at ${number(value, 4)}`).join(", ");
    this.metrics.draw(traces("seconds"), { x: "seconds", words });
    this.byUpdate.draw(traces("updates"), { x: "updates", words });
    for (const plot of [this.metrics, this.byUpdate]) plot.card.hidden = !Object.keys(metrics).length;
  }

  drawCounts(run) {
    const ages = Object.keys(run.staleness.histogram).map(Number).sort((a, b) => a - b);
    this.staleness.card.hidden = !ages.length;
    const counts = ages.map((age) => run.staleness.histogram[age]);
    this.staleness.draw(ages.length ? [{ bars: "up", keys: ages, values: counts, colour: css("computing"), tips: ages.map((age, n) => `${counts[n].toLocaleString("en")} gradients of staleness ${age}`) }] : [],
      { x: "staleness (versions)", y: "gradients", legend: false, words: ages.slice(0, 20).map((age, n) => `${counts[n]} gradients of staleness ${age}`).join(", ") });
    const kinds = [["read", "read from others' memory"], ["pushed", "pushed"], ["saved", "saved by compression"], ["sent", "sent in messages"]].filter(([key]) => run.bytes[key]);
    this.traffic.card.hidden = !kinds.length;
    this.counts.hidden = !kinds.length && !ages.length;
    const lanes = [...run.workers.map((worker) => ["worker " + worker.rank, worker.bytes]), ...run.servers.map((server) => [run.servers.length === 1 ? "server" : "server " + -server.rank, { read: server.read, pushed: 0, saved: 0, sent: 0 }])];
    const most = Math.max(1, ...lanes.flatMap(([, moved]) => kinds.map(([key]) => moved[key])));
    const power = Math.min(4, Math.floor(Math.log10(most) / 3)), unit = Math.pow(1000, power);
    this.traffic.draw(kinds.map(([key, name], n) => ({ bars: "across", name, keys: lanes.map(([lane]) => lane), values: lanes.map(([, moved]) => moved[key] / unit), colour: runColour(n), tips: lanes.map(([lane, moved]) => `${lane}: ${bytes(moved[key])} ${name}`) })),
      { x: ["bytes", "kB", "MB", "GB", "TB"][power], words: lanes.map(([lane, moved]) => `${lane}: ` + kinds.map(([key, name]) => `${bytes(moved[key])} ${name}`).join(", ")).join("; ") });
  }
}

// A table whose first cells are the heads of its rows.
function table(heads, rows, words) {
  const top = heads.map((head) => { const cell = make("th", { textContent: head }); cell.scope = "col"; return cell; });
  return make("table", {}, make("caption", { textContent: words, className: "unseen" }), make("thead", {}, make("tr", {}, ...top)), make("tbody", {}, ...rows));
}

// Lets a click on a head sort the rows by that column: numbers by size, the largest first, words by the alphabet.
function sortable(made) {
  const value = (row, n) => { const text = row.children[n].dataset.value || row.children[n].textContent; return text === "" || isNaN(text) ? text : Number(text); };
  [...made.querySelectorAll("thead th")].forEach((head, n) => {
    const button = make("button", { className: "plain", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      for (const other of made.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...made.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a, n), value(b, n)];
        const order = typeof x === "number" && typeof y === "number" ? x - y : typeof x === "number" ? 1 : typeof y === "number" ? -1 : x.localeCompare(y);
        return up ? order : -order;
      });
      made.tBodies[0].append(...rows);
    });
  });
  return made;
}

// What would have been quicker, by simulation of this run, each with the line to run.
function because(run, worker) {
  const part = run.causes[worker.why] || "mostly cancelled";
  return worker.because ? `${part}: ${worker.because}` : part;
}

function advice(run) {
  if (!run.advice || !run.advice.length) return null;
  const rows = run.advice.map((one) => make("li", {}, make("span", { textContent: one.sentence }), one.command ? make("code", { textContent: one.command }) : null));
  return make("div", { className: "advice" }, make("b", { textContent: "What would be quicker, by simulation of this run" }), make("ul", {}, ...rows));
}

const heard = (worker, run) => {
  const ago = run.now - worker.heard;
  return ago < 1.5 ? "just now" : duration(ago) + " ago";
};

function compare(data, main) {
  const { runs, comparison } = data;
  if (comparison.sentence) main.append(make("div", { className: "verdict section", textContent: comparison.sentence }));
  const contents = make("nav", { className: "contents section" }, make("a", { href: "#comparison", textContent: "Side by side" }), ...runs.map((run, n) => make("a", { href: `#run-${n}`, textContent: run.name })));
  contents.setAttribute("aria-label", "contents");
  main.append(contents);
  const metric = ["loss", ...Object.keys(runs[0].last)].find((name) => runs.some((run) => run.curves.metrics[name]));
  const reach = comparison.seconds_to_loss;
  const fixed = ["run", "strategy", "workers", ...(reach ? ["to the loss"] : []), "samples/s", "× first", "per update", "computing", "waiting", "efficiency", "staleness"];
  const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.last)))];
  const rows = runs.map((run, n) => {
    const total = run.workers.reduce((sum, worker) => sum + PARTS.reduce((s, part) => s + worker.seconds[part], 0), 0) || 1;
    const computing = run.workers.reduce((sum, worker) => sum + worker.seconds.computing, 0);
    const ratio = run.samples_per_second && runs[0].samples_per_second ? run.samples_per_second / runs[0].samples_per_second : null;
    const cells = [
      [run.strategy || "–", run.strategy || ""], [run.workers.length], ...(reach ? [[duration(reach[n]), reach[n]]] : []), [number(run.samples_per_second), run.samples_per_second], [ratio === null ? "–" : ratio.toFixed(2), ratio],
      [run.seconds_per_update === null ? "–" : duration(run.seconds_per_update), run.seconds_per_update], [share(computing / total), computing / total], [share(run.bubbles), run.bubbles], [share(run.efficiency), run.efficiency],
      [run.served ? number(run.staleness.mean) : "–", run.served ? run.staleness.mean : null], ...metrics.map((name) => [number(run.last[name], 4), run.last[name]]),
    ];
    const swatch = make("i", { className: "swatch" });
    swatch.style.background = runColour(n);
    const head = make("th", {}, swatch, make("a", { href: `#run-${n}`, textContent: run.name }));
    head.scope = "row";
    head.dataset.value = run.name;
    return make("tr", { className: comparison.winner === n ? "best" : "" }, head, ...cells.map(([words, value]) => { const cell = make("td", { textContent: words }); cell.dataset.value = value === null || value === undefined ? "" : value === undefined ? words : value; return cell; }));
  });
  const card = make("div", { className: "card scroll section", id: "comparison" }, make("h2", { textContent: "Side by side" }), sortable(table([...fixed, ...metrics], rows, "The runs and their main numbers; a head sorts by its column")));
  card.dataset.figure = "comparison";
  const plots = [new Plot(`${metric || "loss"} against wall-clock`, "Smoothed; the values themselves are faint."), new Plot(`${metric || "loss"} against updates`), new Plot("Throughput, side by side"), new Plot("Where the time goes, side by side", "Shares of all workers' time.")];
  main.append(card, make("div", { className: "grid section" }, ...plots.map((plot) => plot.card)), multiples(runs));
  const keys = runs.map((run) => run.name);
  for (const plot of plots.slice(2)) plot.box.style.height = `${Math.max(200, 110 + 26 * keys.length)}px`;
  for (const [plot, over] of [[plots[0], "seconds"], [plots[1], "updates"]]) {
    plot.card.hidden = !metric;
    plot.box.style.height = `${Math.max(320, 90 + 17 * keys.length)}px`;
    if (!metric) continue;
    plot.offerLog();
    const curve = (run) => run.curves.metrics[metric] || { values: [], [over]: [] };
    plot.draw(runs.map((run, n) => ({ name: run.name, xs: curve(run)[over], ys: curve(run).values, smooth: true, colour: runColour(n) })),
      { x: over, y: metric, labels: true, legend: false, words: runs.map((run) => `${run.name} ended at ${metric} ${number(run.last[metric], 4)}`).join(", ") });
  }
  const rates = runs.map((run) => run.samples_per_second || 0);
  plots[2].draw([{ bars: "across", keys, values: rates, colour: keys.map((_, n) => runColour(n)), tips: keys.map((key, n) => `${key}: ${number(rates[n], 4)} samples/s`) }], { x: "samples per second", legend: false, words: keys.map((key, n) => `${key}: ${number(rates[n], 4)} samples per second`).join(", ") });
  const part = (run, name) => { const total = run.workers.reduce((sum, worker) => sum + PARTS.reduce((s, p) => s + worker.seconds[p], 0), 0) || 1; return 100 * run.workers.reduce((sum, worker) => sum + worker.seconds[name], 0) / total; };
  plots[3].draw(PARTS.map((name) => ({ bars: "across", name: NAMES[name] || name, keys, values: runs.map((run) => part(run, name)), colour: css(name), edge: name === "waiting" ? css("line") : null, tips: runs.map((run) => `${run.name}: ${part(run, name).toFixed(1)} %\n${NAMES[name] || name}`) })),
    { x: "% of the time", most: 100, words: runs.map((run) => `${run.name}: computing ${part(run, "computing").toFixed(0)} %, waiting ${part(run, "waiting").toFixed(0)} %`).join("; ") });
}

// Some updates of every run below each other, all on the time scale of the slowest.
function multiples(runs) {
  const card = make("div", { className: "card section", id: "timelines" }, make("h2", { textContent: "Timelines on one scale" }));
  card.dataset.figure = "timelines";
  const length = Math.max(...runs.map((run) => run.timeline.typical[1] - run.timeline.typical[0]));
  const drawings = runs.map((run) => {
    const canvas = make("canvas", { className: "small" });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${run.name}: a typical part of its timeline, ${duration(length)} long`);
    card.append(make("div", { className: "small", textContent: run.name }), canvas);
    return () => drawSmall(canvas, run.timeline, length);
  });
  card.append(make("div", { className: "small soft", textContent: `Every row is ${duration(length)} long.` }));
  const draw = () => { for (const one of drawings) one(); };
  new ResizeObserver(draw).observe(card);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return card;
}

function title(main, words, about) {
  main.append(make("h1", { textContent: words, className: "section" }), make("div", { className: "soft section", textContent: about }));
}

function about(run) {
  const when = run.started && !run.config.predicted ? new Date(run.started * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "";
  return [run.config.predicted ? "PREDICTED by simulation, not measured" : "", run.strategy, `${run.workers.length} worker${run.workers.length === 1 ? "" : "s"}`, when].filter(Boolean).join(" · ");
}

function report(data) {
  const main = document.getElementById("page");
  const drawn = [];
  const several = data.runs.length > 1;
  if (!several) title(main, data.title, about(data.runs[0]));
  else { title(main, data.title, `${data.runs.length} runs`); compare(data, main); }
  data.runs.forEach((facts, n) => {
    const id = several ? `run-${n}-part` : "run", run = new Run(false, several ? 3 : 2, id);
    if (several) {
      const folded = make("details", { className: "fold run section", id: `run-${n}` }, make("summary", {}, make("h2", { textContent: facts.name }), make("span", { className: "soft", textContent: " " + about(facts) })), ...run.sections);
      folded.addEventListener("toggle", (event) => { if (event.target === folded) run.redraw(); });
      main.append(folded);
    } else {
      main.append(...run.sections);
      const contents = make("nav", { className: "contents section" }, ...run.contents(id));
      contents.setAttribute("aria-label", "contents");
      run.head.before(contents);
    }
    run.update(facts);
    drawn.push(run);
  });
  const unfold = () => { const place = document.getElementById(location.hash.slice(1)); for (let one = place; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true; if (place) place.scrollIntoView(); };
  addEventListener("hashchange", unfold);
  unfold();
  window.paceline = { runs: drawn, figures, show, ready: true };
}

let shown = [];


// For --png: the names of all figures, and one figure alone, with its height.
function figures() {
  const main = document.getElementById("page");
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  main.style.maxWidth = "none";
  main.style.width = "1220px";
  main.style.padding = "20px";
  shown = [...document.querySelectorAll("[data-figure]")].filter((element) => !element.hidden);
  for (const figure of shown) figure.style.margin = "0";
  return shown.map((figure) => figure.dataset.figure);
}

async function show(number) {
  document.getElementById("page").replaceChildren(shown[number]);
  for (const run of window.paceline.runs) run.timeline.draw();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));  // figures notice their width
  return Math.ceil(shown[number].getBoundingClientRect().height);
}

function live() {
  const main = document.getElementById("page");
  const state = make("span", { textContent: "connecting" }), dot = make("span", { className: "dot over" });
  const pause = make("button", { textContent: "pause the drawing" });
  const heading = make("h1", { textContent: "Paceline" }), line = make("div", { className: "soft" });
  main.append(heading, line, make("div", { className: "bar" }, make("span", {}, dot, state), pause));
  const run = new Run(true);
  main.append(...run.sections);
  let paused = false, newest = null, waiting = false;
  window.paceline = { runs: [run], messages: 0, drawings: 0, ready: false };
  const draw = () => {
    waiting = false;
    if (!newest || paused) return;
    heading.textContent = newest.name;
    line.textContent = about(newest);
    run.update(newest);
    window.paceline.drawings++;
    window.paceline.ready = true;
  };
  pause.addEventListener("click", () => { paused = !paused; pause.textContent = paused ? "go on drawing" : "pause the drawing"; draw(); });
  const source = new EventSource("stream" + location.search);
  source.addEventListener("facts", (event) => {
    newest = JSON.parse(event.data);
    window.paceline.messages++;
    state.textContent = newest.over ? "the run is over" : newest.read < 1 ? "reading the events so far: " + Math.round(100 * newest.read) + " %" : newest.starting || "live";
    dot.className = newest.over ? "dot over" : "dot";
    if (newest.over) source.close();
    // A page in the background does not draw; the next facts contain all it missed.
    if (!waiting && !document.hidden) { waiting = true; requestAnimationFrame(draw); }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
  source.onerror = () => { if (!newest || !newest.over) { state.textContent = "no connection; trying again"; dot.className = "dot over"; } };
}
