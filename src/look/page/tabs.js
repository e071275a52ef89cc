// The tabs: each is a function from the shown runs to elements.
"use strict";

const DASHES = [null, null, null, null, "7 3", "7 3", "7 3", "7 3"];
const colorOf = (n) => "var(--c" + (n % 8) + ")";
const last = (points) => (points && points.length ? points[points.length - 1][1] : null);
const recent = (points) => {
  const some = (points || []).slice(-10);
  return some.length ? some.reduce((sum, p) => sum + p[1], 0) / some.length : null;
};
/** The lowest value after the start: an evaluation before the first step is no result of the run. */
const lowest = (points) => {
  const after = (points || []).filter((p) => p[0] > 0);
  return after.length ? after.reduce((m, p) => Math.min(m, p[1]), Infinity) : null;
};
const highest = (points) => (points && points.length ? points.reduce((m, p) => Math.max(m, p[1]), -Infinity) : null);

/** The end of a path that distinguishes runs. */
function shortNames(runs) {
  const parts = runs.map((r) => r.name.split("/").filter(Boolean));
  for (let n = 1; n < 6; n++) {
    const names = parts.map((p) => p.slice(-n).join("/"));
    if (new Set(names).size === names.length) return names;
  }
  return runs.map((r) => r.name);
}

function swatch(shown) {
  return make("span", { class: "swatch", background: shown.color });
}

function table(head, rows, kind) {
  return make("div", { class: "wide" }, make("table", { class: kind },
    head && make("thead", {}, make("tr", {}, head.map((h) => make("th", { scope: "col" }, h)))),
    make("tbody", {}, rows.map(([name, ...cells]) =>
      make("tr", {}, make("th", { scope: "row" }, name), cells.map((c) => make("td", {}, c)))))));
}

function copyButton(text) {
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select the text";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** Whether a run is in progress, on this machine or on another one ("running on HOST?"). */
const isRunning = (run) => run.state === "running" || run.state.startsWith("running on ");

/** Seconds until the end at the pace of the last steps. The time between an end and a resume is not the time of a step. */
function remaining(run) {
  const resume = run.events.findLast((e) => e.event === "resume");
  const time = (run.curves.time || []).filter((p) => !resume || p[1] >= resume.time);
  const [a, b] = [time[Math.max(0, time.length - 30)], time[time.length - 1]];
  if (!isRunning(run) || !run.total_steps || !a || !b || b[0] <= a[0]) return null;
  return ((b[1] - a[1]) / (b[0] - a[0])) * Math.max(0, run.total_steps - b[0]);
}

function overview(shown) {
  const of = (f) => shown.map((s) => f(s.run));
  const c = (name) => (run) => run.curves[name];
  const rows = [
    ["State", ...of((r) => r.state)],
    ["Progress", ...of((r) => (r.total_steps
      ? format.count(r.steps) + " of " + format.count(r.total_steps) + " steps" : "no step yet"))],
    ["Stage and method", ...of((r) => r.stage + ", " + r.method)],
    ["Model", ...of((r) => make("code", {}, r.model))],
    ["Trained parameters", ...of((r) => (r.plan && r.plan.trained_parameters
      ? format.count(r.plan.trained_parameters) + " of " + format.count(r.plan.parameters) : "–"))],
    ["Loss, last 10 steps", ...of((r) => format.number(recent(c("loss")(r))))],
  ];
  const optional = [
    ["Evaluation loss, last", (r) => last(c("eval_loss")(r)), format.number],
    ["Evaluation loss, best", (r) => lowest(c("eval_loss")(r)), format.number],
    ["Exact answers", (r) => last(c("eval_accuracy")(r)), (x) => (x === null ? "–" : (100 * x).toFixed(1) + " %")],
    ["Reward, last 10 steps", (r) => recent(c("reward")(r)), format.number],
    ["Tokens per second", (r) => recent(c("tokens_per_second")(r)), format.count],
    ["Trained tokens", (r) => last(c("trained_tokens")(r)), format.count],
    ["Peak memory", (r) => highest(c("peak_memory_bytes")(r)), format.bytes],
    ["Forecast of the peak", (r) => r.planned_bytes, format.bytes],
    ["Time", (r) => (r.began && r.ended
      ? Math.max(r.ended, last(c("time")(r)) || 0) - r.began : null), format.seconds],
    ["Remaining", remaining, format.seconds],
    ["Checkpoints", (r) => (r.checkpoints.length ? r.checkpoints.join(", ") : null), (x) => x || "–"],
  ];
  for (const [name, value, text] of optional) {
    const values = of(value);
    if (values.some((v) => v !== null && v !== undefined)) rows.push([name, ...values.map(text)]);
  }
  const head = () => ["", ...shown.map((s) => [swatch(s), s.label])];
  const out = [make("h2", {}, "Runs"), table(head(), rows)];
  const warnings = shown.flatMap((s) => [...new Set(s.run.warnings)].map((w) => (shown.length > 1 ? s.label + ": " : "") + w));
  if (warnings.length) {
    out.push(make("h2", {}, "Warnings"), ...warnings.map((w) => make("p", { class: "notice" }, w)));
  }
  out.push(make("h2", {}, "Command"));
  for (const s of shown) {
    if (shown.length > 1) out.push(make("p", { class: "label" }, swatch(s), s.label));
    for (const [n, line] of s.run.command.lines.entries()) {
      const copied = s.run.command.copied[n];
      out.push(make("div", { class: "command" }, make("pre", {}, line), copied && copyButton(line)));
      if (!copied) out.push(make("p", { class: "notice" }, "This command has characters that are not seen. They are shown as escapes."));
    }
    if (!s.run.command.given) {
      out.push(make("p", { class: "label" }, "The run does not record its command; this one gives the same recipe."));
    }
  }
  if (shown.length > 1) {
    out.push(make("h2", {}, "Settings that differ"));
    const maps = shown.map((s) => new Map(s.run.settings.map(([k, v]) => [k, v])));
    const keys = [...new Set(maps.flatMap((m) => [...m.keys()]))].sort();
    const different = keys.filter((k) => k !== "train.output_dir" && new Set(maps.map((m) => m.get(k))).size > 1);
    out.push(different.length
      ? table(head(), different.map((k) => [make("code", {}, k), ...maps.map((m) => make("code", {}, m.get(k) ?? "–"))]), "keys")
      : make("p", { class: "quiet" }, "The settings are the same."));
  }
  for (const s of shown) {
    const chosen = s.run.settings.filter(([, , origin]) => origin === "recipe" || origin === "argument");
    const others = s.run.settings.filter((row) => !chosen.includes(row));
    const rows = (some) => some.map(([k, v, o]) => [make("code", {}, k), make("code", {}, v), o]);
    out.push(make("h2", {}, shown.length > 1 ? ["Recipe of ", s.label] : "Recipe"),
      table(["key", "value", "from"], rows(chosen), "keys"),
      make("details", {}, make("summary", { class: "quiet" }, others.length + " values that were not set in the recipe"),
        table(["key", "value", "from"], rows(others), "keys")));
    if (s.run.recipe) {
      out.push(make("details", {}, make("summary", { class: "quiet" }, "recipe.toml as it was written"), make("pre", {}, s.run.recipe)));
    }
  }
  return out;
}

/** Panels: title, the metric that is a line, the metric that is dots. */
const PANELS = [
  ["Loss", "loss", "eval_loss"],
  ["Learning rate", "learning_rate"],
  ["Gradient norm", "grad_norm"],
  ["Peak memory", "peak_memory_bytes"],
  ["Tokens per second", "tokens_per_second"],
  ["Reward", "reward", "eval_reward"],
  ["KL divergence", "kl", "eval_kl"],
  ["Reward margin", "rewards/margins", "eval_rewards/margins"],
  ["Reward accuracy", "rewards/accuracies", "eval_rewards/accuracies"],
  ["Exact answers", null, "eval_accuracy"],
];
const NO_PANEL = ["epoch", "trained_tokens", "time", "eval_perplexity", "eval_tokens"];
const AS_THEY_ARE = ["learning_rate", "peak_memory_bytes", "epoch"];

/** The axis below the curves: from a run's step to a place. */
function axisOf(kind, shown) {
  const at = (points, step) => {
    const i = before(points, step);
    const y = (n) => bounded(points[n][1]);
    if (i < 0) return points.length ? y(0) : 0;
    const [a, b] = [points[i], points[i + 1]];
    return b ? y(i) + ((step - a[0]) / (b[0] - a[0])) * (y(i + 1) - y(i)) : y(i);
  };
  if (kind === "tokens") {
    return { name: "trained tokens", text: format.count, tick: (x) => axisLabel(x),
      of: (run) => (step) => at(run.curves.trained_tokens || [], step) };
  }
  if (kind === "time") {
    return { name: "after", text: format.seconds, tick: (x) => (x === 0 ? "0" : format.seconds(x).replace(/ 00s$| 00m$/, "").replace(/\.0 s/, " s")),
      of: (run) => (step) => Math.max(0, at(run.curves.time || [], step) - (run.began || 0)) };
  }
  return { name: "step", text: format.count, tick: (x) => axisLabel(x), of: () => (step) => step };
}

function curves(shown, settings, redraw) {
  const hasTime = shown.every((s) => (s.run.curves.time || []).length);
  const kind = settings.axis === "time" && !hasTime ? "step" : settings.axis;
  const axis = axisOf(kind, shown);
  const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: settings.smooth, id: "smooth" });
  const value = make("output", { for: "smooth" }, settings.smooth.toFixed(2));
  slider.addEventListener("input", () => {
    settings.smooth = Number(slider.value);
    value.textContent = settings.smooth.toFixed(2);
    redraw(fill);
  });
  const select = make("select", { onchange: (e) => { settings.axis = e.target.value; redraw(); } },
    [["step", "step"], ["tokens", "trained tokens"], ["time", "time"]].map(([v, t]) =>
      make("option", { value: v, selected: v === kind, disabled: v === "time" && !hasTime }, t)));
  const log = make("input", { type: "checkbox", checked: settings.log, onchange: (e) => { settings.log = e.target.checked; redraw(); } });
  const grid = make("div", { class: "charts" });
  const more = make("div", { class: "charts" });
  const known = new Set(PANELS.flat());
  const fill = () => {
    const panel = (title, line, dots) => {
      const plain = AS_THEY_ARE.includes(line);
      const bytes = /_bytes$/.test(line || "");
      const series = shown.filter((s) => s.run.curves[line] || s.run.curves[dots]).map((s) => {
        const place = axis.of(s.run);
        const points = (name) => (s.run.curves[name] || []).map(([x, y]) => [place(x), y]);
        const raw = points(line);
        return { label: s.label, color: s.color, dash: s.dash, dots: points(dots),
          line: plain ? raw : smoothed(raw, settings.smooth), raw: plain || settings.smooth === 0 ? [] : raw };
      });
      if (!series.length) return null;
      const limits = line === "peak_memory_bytes"
        ? shown.filter((s) => s.run.planned_bytes).map((s) => ({ y: s.run.planned_bytes, color: s.color,
          label: shown.length > 1 ? "forecast of " + s.label : "forecast" })) : [];
      const switches = shown.length === 1 && ["loss", "grad_norm"].includes(line)
        ? shown[0].run.switches.map(([x, name]) => [axis.of(shown[0].run)(x), name]) : [];
      const logarithmic = settings.log && ["loss", "grad_norm", "kl"].includes(line);
      return chart({ title, series, limits, switches, bytes, log: logarithmic, x: axis });
    };
    const charts = PANELS.map((p) => panel(...p)).filter(Boolean);
    grid.replaceChildren(...charts);
    const others = [...new Set(shown.flatMap((s) => Object.keys(s.run.curves)))]
      .filter((name) => !known.has(name) && !NO_PANEL.includes(name)).sort();
    const rest = others.map((name) => (name.startsWith("eval_") ? panel(name, null, name) : panel(name, name))).filter(Boolean);
    more.replaceChildren(...rest);
    for (const c of [...charts, ...rest]) c.draw();
  };
  const out = [
    make("div", { class: "controls" },
      make("label", { for: "smooth" }, "Smoothing"), slider, value,
      make("label", {}, "Axis", select),
      make("label", {}, log, "logarithmic loss")),
    grid,
    make("details", { ontoggle: () => fill() }, make("summary", { class: "quiet" }, "Other metrics"), more),
  ];
  fill.settled = fill;
  out.redraw = fill;
  return out;
}

function samples(shown) {
  const out = [];
  for (const s of shown) {
    const all = s.run.samples;
    if (shown.length > 1) out.push(make("h2", {}, swatch(s), s.label));
    const own = all.filter((line) => line.when);
    const prompts = [...new Set(own.map((line) => line.prompt))];
    for (const prompt of prompts) {
      const of = (when) => own.findLast((line) => line.prompt === prompt && line.when === when);
      const [a, b] = [of("before"), of("after")];
      const reference = (b || a || {}).reference;
      const part = (title, text, none) => make("div", {}, make("h3", {}, title),
        text === undefined || text === null ? make("p", { class: "quiet" }, none)
          : make("p", { class: "text" }, text === "" ? "(empty)" : text));
      out.push(make("article", { class: "sample" }, make("p", {}, prompt), make("div", { class: "three" },
        part("Before", a && a.completion, "not answered"),
        part(b ? "After step " + textOf(b.step) : "After", b && b.completion, "not answered yet"),
        part("Reference", reference, "not in the rows for evaluation"))));
    }
    const rolled = all.filter((line) => !line.when);
    for (const line of rolled.slice(-40).reverse()) {
      const rewards = Object.entries(line.rewards || {}).map(([k, v]) => k + " " + format.number(v)).join(", ");
      out.push(make("article", { class: "sample" },
        make("p", { class: "label" }, "step " + textOf(line.step) + (rewards ? ", " + rewards : "") +
          (line.advantage === undefined ? "" : ", advantage " + format.number(line.advantage))),
        make("p", {}, line.prompt), make("div", { class: "three" },
          make("div", {}, make("h3", {}, "Answer"), make("p", { class: "text" }, line.completion)),
          line.answer !== null && line.answer !== undefined && make("div", {}, make("h3", {}, "Reference"),
            make("p", { class: "text" }, typeof line.answer === "string" ? line.answer : JSON.stringify(line.answer))))));
    }
    if (!all.length) {
      out.push(make("p", { class: "quiet" }, "This run has no samples. ",
        make("code", {}, "train.sample_prompts"), " names prompts that the model answers before and after training."));
    }
  }
  return out;
}

function data(shown) {
  const out = [make("p", { class: "quiet" }, make("mark", {}, "Marked"), " tokens are trained; the others are only read.")];
  for (const s of shown) {
    out.push(make("h2", {}, swatch(s), s.label));
    const event = s.run.events.findLast((e) => e.event === "data");
    if (event) {
      const names = [["rows", "rows"], ["tokens", "tokens"], ["trained_tokens", "trained tokens"],
        ["truncated_rows", "cut rows"], ["dropped_rows", "dropped rows"]];
      out.push(make("p", { class: "quiet" }, names.filter(([k]) => event[k] !== undefined)
        .map(([k, t]) => format.count(event[k]) + " " + t).join(", ")));
    }
    for (const [n, row] of s.run.rows.entries()) {
      const parts = Array.isArray(row.parts) ? row.parts.filter(Array.isArray) : [];
      out.push(make("div", { class: "row" },
        make("p", { class: "label" }, "row " + textOf(row.number ?? n + 1) + ", " + format.count(row.tokens) + " tokens, " +
          format.count(row.trained) + " trained"),
        make("pre", { tabindex: 0 }, parts.map(([text, trained]) => (trained ? make("mark", {}, text) : text)))));
    }
    if (!s.run.rows.length) {
      out.push(make("p", { class: "quiet" }, "This run has no ", make("code", {}, "rows.jsonl"), ". ",
        make("code", {}, "ft data --recipe FILE"), " shows the rows."));
    }
  }
  return out;
}

const PARTS = { weights: "weights", adapters: "adapters", optimizer: "optimizer state", gradients: "gradients",
  layer_inputs: "layer inputs", activations: "activations", layer_work: "work of a layer", logits: "logits",
  rollout: "rollout", saving: "saving", data: "data", scratch: "scratch", process: "process", retired_halves: "retired halves" };

const partName = (name) => (Object.hasOwn(PARTS, name) ? PARTS[name] : name);

function memory(shown) {
  const out = [];
  for (const s of shown) {
    const plan = s.run.plan || {};
    const parts = Object.entries(plan.at_peak || {}).filter(([, n]) => typeof n === "number" && n > 0).sort((a, b) => b[1] - a[1]);
    const planned = s.run.planned_bytes || 0;
    const measured = highest(s.run.curves.peak_memory_bytes);
    out.push(make("h2", {}, swatch(s), s.label));
    if (!parts.length) {
      out.push(make("p", { class: "quiet" }, "This run has no readable plan.json."));
      continue;
    }
    const whole = Math.max(planned, measured || 0, 1);
    const bar = (label, n, pieces) => [
      make("div", { class: "barlabel" }, make("span", {}, label), make("span", {}, format.bytes(n))),
      make("div", { class: "bar", role: "img", "aria-label": label + ": " + format.bytes(n) }, pieces.map(([title, size, color]) => {
        const piece = make("i", { title: title + ": " + format.bytes(size), background: color });
        piece.style.width = 100 * (size / whole) + "%";
        return piece;
      })),
    ];
    out.push(...bar("Forecast" + (plan.peak_moment ? ", peak during " + textOf(plan.peak_moment) : ""), planned,
      parts.map(([name, n], i) => [partName(name), n, colorOf(i)])));
    if (measured !== null) out.push(...bar("Measured peak", measured, [["measured", measured, s.color]]));
    out.push(make("div", { class: "split" },
      make("div", {}, make("h2", {}, "At the peak"), table(["part", "forecast", "share"], parts.map(([name, n], i) =>
        [[make("span", { class: "swatch", background: colorOf(i) }), partName(name)], format.bytes(n),
          planned ? ((100 * n) / planned).toFixed(1) + " %" : "–"]))),
      make("div", {}, make("h2", {}, "Strategy"), table(["", "chosen", "reason"], [
        ...Object.entries(plan.strategy || {}).map(([k, v]) => [k.replaceAll("_", " "), textOf(v), ""]),
        ...Object.entries(plan.chosen || {}).map(([k, v]) => [make("code", {}, k), textOf(v?.value), textOf(v?.why)]),
      ]))));
  }
  return out;
}

function events(shown, settings, redraw) {
  const timeOf = (e) => (typeof e.time === "number" ? e.time : 0);
  const all = shown.flatMap((s) => s.run.events.map((e) => ({ s, e, kind: textOf(e.event) }))).sort((a, b) => timeOf(b.e) - timeOf(a.e));
  const kinds = [...new Set(all.map(({ kind }) => kind))].sort();
  const select = make("select", { onchange: (e) => { settings.kind = e.target.value; redraw(); } },
    make("option", { value: "" }, "all"), kinds.map((k) => make("option", { value: k, selected: k === settings.kind }, k)));
  const seen = all.filter(({ kind }) => !settings.kind || kind === settings.kind).slice(0, 500);
  const text = (e) => Object.entries(e).filter(([k]) => k !== "time" && k !== "event")
    .map(([k, v]) => (k === "message" ? textOf(v) : k.replaceAll("_", " ") + " " + textOf(v))).join(", ");
  return [
    make("div", { class: "controls" }, make("label", {}, "Kind", select), make("span", {}, format.count(seen.length) + " events, the newest first")),
    make("div", { class: "wide" }, make("table", { class: "events" },
      make("thead", {}, make("tr", {}, ["Time", ...(shown.length > 1 ? ["Run"] : []), "Event", ""].map((h) => make("th", { scope: "col" }, h)))),
      make("tbody", {}, seen.map(({ s, e, kind }) => make("tr", {}, make("td", {}, format.time(e.time)),
        shown.length > 1 && make("td", { class: "of" }, swatch(s), s.label),
        make("td", {}, make("span", { class: "tag " + (/^[a-z_]+$/.test(kind) ? kind : "") }, kind.replaceAll("_", " "))),
        make("td", {}, text(e))))))),
  ];
}

const TABS = [["overview", "Overview", overview], ["curves", "Curves", curves], ["samples", "Samples", samples],
  ["data", "Data", data], ["memory", "Memory", memory], ["events", "Events", events]];
