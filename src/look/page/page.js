// Which runs and which tab are shown; loads runs, and follows those in progress.
"use strict";

const MOST = 8;
/** As in the views of runs. */
const MOST_METRICS = 1000;
const page = {
  /** The list of runs; the loaded runs by number. */
  list: [],
  loaded: new Map(),
  chosen: [],
  tab: "overview",
  settings: { smooth: 0.6, axis: "step", log: false, kind: "" },
  served: true,
  live: null,
};
const $ = (id) => document.getElementById(id);

function shownRuns() {
  const runs = page.chosen.map((id) => page.loaded.get(id)).filter(Boolean);
  const names = shortNames(runs);
  return runs.map((run, i) => {
    const n = page.chosen.indexOf(run.id);
    return { run, label: names[i], color: colorOf(n), dash: DASHES[n] };
  });
}

let drawn = [];
function render() {
  const [, , tab] = TABS.find(([id]) => id === page.tab);
  const shown = shownRuns();
  const panel = $("panel");
  const again = panel.dataset.tab === page.tab;
  panel.dataset.tab = page.tab;
  const open = again ? [...panel.querySelectorAll("details")].map((d) => d.open) : [];
  // What the reader uses is drawn again while a run goes on: it keeps the focus and its place.
  const usable = () => [...panel.querySelectorAll("button, summary, input, select, a")];
  const focus = usable().indexOf(document.activeElement);
  const left = again ? [...panel.querySelectorAll(".wide")].map((w) => w.scrollLeft) : [];
  panel.setAttribute("aria-labelledby", "tab-" + page.tab);
  drawn = [];
  if (!shown.length) {
    panel.replaceChildren(make("p", { class: "quiet" }, page.list.length ? "Choose a run." : "There is no run yet."));
    return;
  }
  const parts = tab(shown, page.settings, (only) => (only ? only() : render()));
  panel.replaceChildren(...parts);
  if (parts.redraw) {
    parts.redraw();
    drawn = [parts.redraw];
  }
  panel.querySelectorAll("details").forEach((d, i) => { if (open[i]) d.open = true; });
  panel.querySelectorAll(".wide").forEach((w, i) => { w.scrollLeft = left[i] || 0; });
  if (focus >= 0 && usable()[focus]) usable()[focus].focus({ preventScroll: true });
}

function renderTabs() {
  const tabs = TABS.map(([id, title]) => make("button", {
    type: "button", role: "tab", id: "tab-" + id, "aria-controls": "panel", "aria-selected": String(id === page.tab),
    tabindex: id === page.tab ? 0 : -1, onclick: () => choose(id),
  }, title));
  $("tabs").replaceChildren(...tabs);
}

function choose(id) {
  const focus = $("tabs").contains(document.activeElement);
  page.tab = id;
  history.replaceState(null, "", "#" + id);
  renderTabs();
  render();
  if (focus) $("tab-" + id).focus();
}

function renderList() {
  const names = shortNames(page.list);
  $("count").textContent = page.list.length ? "(" + page.list.length + ")" : "";
  $("runs").replaceChildren(...page.list.map((entry, i) => {
    const n = page.chosen.indexOf(entry.id);
    const box = make("input", { type: "checkbox", checked: n >= 0, disabled: n < 0 && page.chosen.length >= MOST, id: "run-" + entry.id });
    box.checked = n >= 0;
    box.addEventListener("change", () => toggle(entry.id, box.checked));
    const what = [entry.state, [entry.stage, entry.method].filter(Boolean).join(" ")].filter(Boolean).join(", ");
    return make("label", { class: "run", title: entry.name }, box,
      make("b", {}, n >= 0 && make("span", { class: "swatch", background: colorOf(n) }), names[i]), make("span", {}, what));
  }));
}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(path + ": " + answer.status);
  return answer.json();
}

function say(text) { if ($("state").textContent !== text) $("state").textContent = text; }

/** Keeps a run. Its curves have the names that a file has: `constructor` is one like others. */
function keep(run) {
  run.curves = Object.assign(Object.create(null), run.curves);
  page.loaded.set(run.id, run);
}

async function load(id) {
  try {
    keep(await get("run/" + id + ".json"));
  } catch (e) {
    page.loaded.delete(id);
    say("a run cannot be read: " + e.message);
  }
}

async function toggle(id, on) {
  page.chosen = page.chosen.filter((other) => other !== id);
  if (on && page.chosen.length < MOST) page.chosen.push(id);
  const focus = document.activeElement && document.activeElement.id;
  renderList();
  if (focus && $(focus)) $(focus).focus();
  if (on && !page.loaded.has(id) && page.served) await load(id);
  render();
  follow();
}

/** Adds a line of metrics to the curves of a run. */
function append(run, line) {
  if (!line || !Number.isInteger(line.step) || line.step < 0) return;
  if (typeof line.active_block === "string") {
    const block = run.switches[run.switches.length - 1];
    if (!block || block[1] !== line.active_block) run.switches.push([line.step, line.active_block]);
  }
  run.steps = Math.max(run.steps, line.step);
  for (const [name, y] of Object.entries(line)) {
    if (name === "step" || typeof y !== "number") continue;
    if (!run.curves[name] && Object.keys(run.curves).length >= MOST_METRICS) continue;
    const curve = run.curves[name] || (run.curves[name] = []);
    while (curve.length && curve[curve.length - 1][0] >= line.step) curve.pop();
    curve.push([line.step, y]);
    if (curve.length > 4000) run.curves[name] = thinned(curve, 2000);
  }
}

let waiting = null;
/** Draws at most twice a second, and not while the user reads a value. */
function soon() {
  if (waiting) return;
  waiting = setTimeout(() => {
    waiting = null;
    const reading = document.querySelector("svg .cursor, select:focus, input[type=range]:active");
    if (reading && page.tab === "curves") return soon();
    if (drawn.length) drawn.forEach((draw) => draw());
    else if (page.tab === "overview" || page.tab === "memory") soonAll();
  }, 500);
}

function follow() {
  if (!page.served) return;
  if (page.live) page.live.close();
  page.live = null;
  const runs = page.chosen.map((id) => page.loaded.get(id)).filter(Boolean);
  if (!runs.length) return;
  const places = runs.map((r) => [r.id, r.metrics_bytes, r.events_bytes, r.samples_bytes].join(":"));
  const live = new EventSource("live?runs=" + places.join(","));
  page.live = live;
  live.onopen = () => say("live");
  live.onmessage = async (message) => {
    const news = JSON.parse(message.data);
    const run = page.loaded.get(news.run);
    if (!run) return;
    if (news.changed) {
      live.close();
      await load(news.run);
      // A request that began before the change has the state before it. If there is no answer, the next one comes with the timer.
      await Promise.resolve(listing).then(list, list).catch(() => {});
      if (page.live === live) {
        soonAll();
        follow();
      }
      return;
    }
    for (const line of news.lines) append(run, line);
    soon();
  };
  // A new connection would send old lines again: the runs are loaded again first.
  live.onerror = () => {
    live.close();
    if (page.live !== live) return;
    say("not connected; `ft dash` does not answer");
    setTimeout(async () => {
      if (page.live !== live) return;
      try {
        await list();
        await Promise.all(page.chosen.map(load));
        render();
      } catch { /* asked again below */ }
      follow();
    }, 3000);
  };
}

/** After a change of anything but metrics. */
function soonAll() {
  // The curves are those of the runs that were loaded before.
  if (page.tab === "curves" || !document.getSelection() || document.getSelection().isCollapsed) render();
}

let listing = null;
/** One request at a time: with many runs an answer takes longer than the time between two requests. */
function list() {
  if (!listing) listing = loadList().finally(() => { listing = null; });
  return listing;
}

async function loadList() {
  page.list = (await get("runs.json")).runs;
  const alive = new Set(page.list.map((entry) => entry.id));
  page.chosen = page.chosen.filter((id) => alive.has(id));
  for (const entry of page.list) {
    const run = page.loaded.get(entry.id);
    if (run) run.state = entry.state;
  }
  const focus = document.activeElement && document.activeElement.id;
  renderList();
  if (focus && focus.startsWith("run-") && $(focus)) $(focus).focus();
}

function theme() {
  const select = $("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let kept = "";
  try { kept = localStorage.getItem("ft-theme") || ""; } catch { /* a file has no storage in some browsers */ }
  select.value = kept;
  const set = () => {
    document.documentElement.dataset.theme = select.value || (dark.matches ? "dark" : "light");
  };
  select.addEventListener("change", () => {
    try { localStorage.setItem("ft-theme", select.value); } catch { /* as above */ }
    set();
  });
  dark.addEventListener("change", set);
  set();
}

async function start() {
  theme();
  const wanted = location.hash.slice(1);
  if (TABS.some(([id]) => id === wanted)) page.tab = wanted;
  $("tabs").addEventListener("keydown", (e) => {
    const now = TABS.findIndex(([id]) => id === page.tab);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: TABS.length - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    choose(TABS[(to + TABS.length) % TABS.length][0]);
  });
  window.addEventListener("hashchange", () => {
    const id = location.hash.slice(1);
    if (id !== page.tab && TABS.some(([other]) => other === id)) choose(id);
  });
  let resized = null;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => drawn.forEach((draw) => draw()), 100);
  });
  if (matchMedia("(max-width: 860px)").matches) $("side").open = false;
  renderTabs();
  const data = $("data");
  if (data) {
    page.served = false;
    const runs = JSON.parse(data.textContent).runs;
    runs.forEach(keep);
    page.list = runs;
    page.chosen = runs.map((run) => run.id).slice(0, MOST);
    say("a copy, as of " + format.time(Math.max(...runs.map((run) => run.ended || 0))));
    renderList();
    return render();
  }
  await list();
  const newest = [...page.list].sort((a, b) => isRunning(b) - isRunning(a) || (b.began || 0) - (a.began || 0));
  page.chosen = newest.slice(0, page.list.length <= 3 ? 3 : 1).map((entry) => entry.id).sort((a, b) => a - b);
  await Promise.all(page.chosen.map(load));
  renderList();
  render();
  follow();
  setInterval(() => { list().catch(() => {}); }, 15000);
}

start().catch((e) => {
  $("panel").replaceChildren(make("p", { class: "notice" }, "The page cannot load its runs: " + e.message));
});
