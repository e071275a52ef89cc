// Charts as SVG, and the formats of numbers. Text is set as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** Any value of a file as text. */
const textOf = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));

/** An element: its attributes (`on...`: listeners), and its children: elements or texts. */
function make(name, attributes, ...children) {
  const drawn = ["svg", "g", "path", "line", "circle", "text", "rect"].includes(name);
  const element = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "color") element.style.color = value;
    else if (key === "background") element.style.background = value;
    else if (key === "stroke" || key === "fill") element.style.setProperty(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : textOf(child));
    }
  }
  return element;
}

const format = {
  number(y) {
    if (!Number.isFinite(y)) return "–";
    const a = Math.abs(y);
    if (a === 0) return "0";
    if (a < 1e-3 || a >= 1e6) return y.toExponential(2);
    if (a >= 1000) return Math.round(y).toLocaleString("en-US");
    return y.toFixed(a >= 100 ? 1 : a >= 10 ? 2 : 4);
  },
  count(n) { return typeof n !== "number" ? "–" : Math.round(n).toLocaleString("en-US"); },
  bytes(n) {
    if (typeof n !== "number") return "–";
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
      if (n >= size) return (n / size).toFixed(1) + " " + unit;
    }
    return Math.round(n) + " B";
  },
  seconds(s) {
    if (!Number.isFinite(s)) return "–";
    if (s < 60) return s.toFixed(s < 10 ? 1 : 0) + " s";
    const pad = (n) => String(Math.floor(n)).padStart(2, "0");
    if (s < 3600) return Math.floor(s / 60) + "m " + pad(s % 60) + "s";
    return Math.floor(s / 3600) + "h " + pad((s % 3600) / 60) + "m";
  },
  time(unix) {
    if (typeof unix !== "number" || !unix) return "–";
    const d = new Date(unix * 1000);
    if (Number.isNaN(d.getTime())) return "–";
    const pad = (n) => String(n).padStart(2, "0");
    return d.getFullYear() + "-" + pad(d.getMonth() + 1) + "-" + pad(d.getDate()) + " " +
      pad(d.getHours()) + ":" + pad(d.getMinutes()) + ":" + pad(d.getSeconds());
  },
};

/** Short labels for an axis. */
function axisLabel(y, bytes) {
  if (bytes) return format.bytes(y).replace(".0 ", " ");
  const a = Math.abs(y);
  if (a === 0) return "0";
  if (a >= 1e21) return String(+y.toPrecision(4));
  if (a >= 1e6) return +(y / 1e6).toFixed(2) + "M";
  if (a >= 1e4) return +(y / 1e3).toFixed(1) + "k";
  if (a < 1e-3) return y.toExponential(0);
  return String(+y.toPrecision(4));
}

/** Round values between two numbers; of bytes: round in their unit. */
function ticks(low, high, most, bytes) {
  if (!(high > low)) return [low];
  if (bytes) {
    const unit = 1024 ** Math.floor(Math.log(high) / Math.log(1024));
    return ticks(low / unit, high / unit, most).map((y) => y * unit);
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  // Numbers of this size have no values between them.
  if (step < 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low];
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && out.length < 100; i++) out.push(i * step);
  return out;
}

/** The values that a logarithmic axis has: half and twice of them are numbers, too. */
const LOG = [1e-300, 1e300];
/** A value as an axis has it: differences of such values are numbers, too. */
const bounded = (y) => Math.max(-LOG[1], Math.min(LOG[1], y));

function logTicks(low, high) {
  const out = [];
  if (!(low >= LOG[0] / 10 && high <= LOG[1] * 10)) return out;
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    for (const m of [1, 2, 5]) {
      const y = m * 10 ** p;
      if (y >= low * 0.999 && y <= high * 1.001) out.push(y);
    }
  }
  const wide = out.filter((y) => Number.isInteger(Math.round(Math.log10(y) * 1e9) / 1e9));
  return out.length > 6 && wide.length > 1 ? wide : out;
}

/** Exponential moving average with a corrected start, as in Adam. */
function smoothed(points, weight) {
  if (weight <= 0) return points;
  let mean = 0;
  let sum = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    sum = weight * sum + (1 - weight);
    return [x, mean / sum];
  });
}

/** At most `most` points: lowest and highest of each part. */
function thinned(points, most) {
  if (points.length <= most) return points;
  const each = Math.ceil(points.length / (most / 2));
  const out = [];
  for (let i = 0; i < points.length; i += each) {
    let low = points[i];
    let high = points[i];
    for (const p of points.slice(i, i + each)) {
      if (p[1] < low[1]) low = p;
      if (p[1] > high[1]) high = p;
    }
    out.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return out;
}

/** The place of the last point at or before x; -1: there is none. */
function before(points, x) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/**
 * A chart. `series`: {label, color, dash, raw, line, dots} with lists of [x, y]; `limits`: {y, label, color};
 * `switches`: [[x, label]]; `bytes`: the values are bytes; `log`: logarithmic values.
 */
function chart({ title, series, limits = [], switches = [], bytes = false, log = false, x: axis }) {
  const at = make("span", { class: "at" });
  const legend = make("ul", { class: "legend", "aria-live": "polite" });
  const svg = make("svg", { tabindex: 0, role: "img" });
  const box = make("figure", { class: "chart" },
    make("figcaption", {}, make("h3", {}, title), at), legend, svg);
  const seen = (y) => !log || (y >= LOG[0] && y <= LOG[1]);
  const usable = (p) => seen(p[1]);
  const drawn = series.map((s) => ({
    ...s,
    raw: thinned((s.raw || []).filter(usable), 1200),
    line: thinned((s.line || []).filter(usable), 1200),
    dots: (s.dots || []).filter(usable),
  }));
  const all = drawn.flatMap((s) => [...s.raw, ...s.line, ...s.dots]);
  const range = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const [x0, x1] = range(all.map((p) => p[0]));
  let [y0, y1] = range([...all.map((p) => p[1]), ...limits.map((l) => l.y).filter(seen)].map(bounded));
  if (bytes && !log) y0 = 0;
  // A smoothed curve of equal values differs in its last bits.
  if (!(y1 - y0 > 1e-9 * Math.max(Math.abs(y0), Math.abs(y1)))) [y0, y1] = log ? [y0 / 2, y1 * 2] : [y0 - Math.abs(y0) * 0.1 - 1e-12, y1 + Math.abs(y1) * 0.1 + 1e-12];
  else if (!log) [y0, y1] = [bytes ? 0 : y0 - (y1 - y0) * 0.04, y1 + (y1 - y0) * 0.06];

  const readable = (y) => (bytes ? format.bytes(y) : format.number(y));
  const valueAt = (s, x) => {
    const points = s.line.length ? s.line : s.raw.length ? s.raw : s.dots;
    const i = before(points, x);
    return i < 0 ? null : points[i][1];
  };
  const say = (x) => {
    at.textContent = (x === null ? "last" : axis.name + " " + axis.text(x));
    const items = drawn.map((s) => {
      const dots = s.dots.length && (s.line.length || s.raw.length) ? before(s.dots, x === null ? x1 : x) : -1;
      return make("li", { title: s.label }, make("span", { class: "swatch", background: s.color }), s.label,
        make("b", {}, readable(valueAt(s, x === null ? Infinity : x))),
        dots >= 0 && make("b", {}, "eval " + readable(s.dots[dots][1])));
    });
    const near = x === null ? null : switches[before(switches, x)];
    const more = limits.map((l) => make("li", {}, l.label, make("b", {}, readable(l.y))));
    legend.replaceChildren(...items, ...more, ...(near ? [make("li", {}, near[1])] : []));
    const [first] = drawn;
    svg.setAttribute("aria-label", title + ", " + at.textContent + ": " +
      drawn.map((s) => s.label + " " + readable(valueAt(s, x === null ? Infinity : x))).join(", ") +
      (first ? ". Arrow keys read single values." : ""));
  };

  let draw = () => {};
  let placed = null;
  const show = (x) => {
    placed = x;
    say(x);
    const old = svg.querySelector(".cursor");
    if (old) old.remove();
    if (x !== null) svg.append(make("line", { class: "cursor", x1: draw.x(x), x2: draw.x(x), y1: 8, y2: draw.bottom }));
  };
  draw = () => {
    const width = Math.max(200, svg.clientWidth || 400);
    const height = 220;
    const f = log ? Math.log : (y) => y;
    const marks = log ? logTicks(y0, y1) : ticks(y0, y1, 5, bytes);
    const left = 14 + 6.2 * Math.max(...marks.map((m) => axisLabel(m, bytes).length), 2);
    const [right, top, bottom] = [width - 8, 8, height - 24];
    const X = (x) => left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (right - left);
    const Y = (y) => bottom - ((f(bounded(y)) - f(y0)) / (f(y1) - f(y0))) * (bottom - top);
    draw.x = X;
    draw.bottom = bottom;
    draw.back = (px) => x0 + Math.min(1, Math.max(0, (px - left) / (right - left))) * (x1 - x0);
    svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    const parts = [];
    for (const m of marks) {
      parts.push(make("line", { class: "grid", x1: left, x2: right, y1: Y(m), y2: Y(m) }));
      parts.push(make("text", { x: left - 8, y: Y(m) + 4, "text-anchor": "end" }, axisLabel(m, bytes)));
    }
    const across = all.length ? ticks(x0, x1, Math.max(2, Math.floor(width / 110))) : [];
    for (const m of across) {
      const anchor = X(m) > right - 14 ? "end" : X(m) < left + 14 ? "start" : "middle";
      parts.push(make("text", { x: X(m), y: height - 6, "text-anchor": anchor }, axis.tick(m)));
    }
    parts.push(make("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }));
    if (switches.length <= 60) {
      for (const [x] of switches) parts.push(make("line", { class: "switch", x1: X(x), x2: X(x), y1: top, y2: bottom }));
    }
    for (const l of limits) {
      if (seen(l.y)) parts.push(make("line", { class: "limit", stroke: l.color, x1: left, x2: right, y1: Y(l.y), y2: Y(l.y) }));
    }
    const path = (points) => points.map((p, i) => (i ? "L" : "M") + X(p[0]).toFixed(1) + " " + Y(p[1]).toFixed(1)).join("");
    for (const s of drawn) {
      if (s.raw.length > 1) parts.push(make("path", { class: "raw", stroke: s.color, d: path(s.raw) }));
    }
    for (const s of drawn) {
      if (s.line.length > 1) parts.push(make("path", { class: "line", stroke: s.color, "stroke-dasharray": s.dash, d: path(s.line) }));
      const single = s.line.length === 1 ? s.line : [];
      if (s.dots.length > 1) parts.push(make("path", { class: "raw", stroke: s.color, d: path(s.dots) }));
      for (const p of [...thinned(s.dots, 200), ...single]) {
        parts.push(make("circle", { cx: X(p[0]), cy: Y(p[1]), r: 3.2, fill: s.color }));
      }
    }
    svg.replaceChildren(...parts);
    show(placed);
  };
  svg.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect();
    show(draw.back(((e.clientX - box.left) / box.width) * svg.viewBox.baseVal.width));
  });
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (e) => {
    const points = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b).map((x) => [x]);
    const now = placed === null ? points.length - 1 : before(points, placed);
    const far = Math.max(1, Math.round(points.length / 20));
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: points.length - 1 }[e.key];
    if (to === undefined || !points.length) return;
    e.preventDefault();
    show(points[Math.min(points.length - 1, Math.max(0, to))][0]);
  });
  say(null);
  box.draw = draw;
  return box;
}
