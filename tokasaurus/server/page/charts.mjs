// Charts as SVG. Colours are classes of the style sheet, so that they follow the theme.

import { compact, duration, shortest } from "./samples.mjs";

const SVG = "http://www.w3.org/2000/svg";
const LETTER_WIDTH = 6.4; // of labels, on average
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Round whole numbers from 0 to at least `largest`: about `most` steps.
export function valueTicks(largest, most) {
  const rough = Math.max(1, largest / most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10]
    .map((factor) => factor * power)
    .find((size) => size >= rough && Number.isInteger(size));
  const number = Math.ceil(largest / step - 1e-9);
  return Array.from({ length: Math.max(1, number) + 1 }, (_, position) => position * step);
}

// Round times between -past and future, 0 among them.
export function timeTicks(past, future, most) {
  const step =
    TIME_STEPS.find((size) => (past + future) / size <= most) ?? Math.ceil((past + future) / most / 86400) * 86400;
  const ticks = [];
  for (let time = -Math.floor(past / step) * step; time <= future + 1e-9; time += step) ticks.push(time + 0);
  return ticks;
}

export function timeLabel(seconds) {
  return seconds === 0 ? "now" : `${seconds < 0 ? "−" : "+"}${duration(Math.abs(seconds))}`;
}

// Path of a line through the points; null values and `breaks` part it.
export function linePath(xs, ys, breaks = null) {
  let path = "";
  let isDrawing = false;
  xs.forEach((x, position) => {
    const y = ys[position];
    if (x === null || y === null) {
      isDrawing = false;
      return;
    }
    path += `${isDrawing && !breaks?.[position] ? "L" : "M"}${round(x)} ${round(y)}`;
    isDrawing = true;
  });
  return path;
}

// Path of the area between two lines; parted where a line is.
export function areaPath(xs, lows, highs, breaks = null) {
  let path = "";
  let start = 0;
  const close = (end) => {
    if (end - start >= 2) {
      const at = Array.from({ length: end - start }, (_, position) => start + position);
      const up = at.map((position) => `${round(xs[position])} ${round(highs[position])}`);
      const down = at.reverse().map((position) => `${round(xs[position])} ${round(lows[position])}`);
      path += `M${up.join("L")}L${down.join("L")}Z`;
    }
  };
  xs.forEach((_, position) => {
    const isKnown = lows[position] !== null && highs[position] !== null;
    if (!isKnown || breaks?.[position]) close(position);
    if (!isKnown) start = position + 1;
    else if (breaks?.[position]) start = position;
    if (position === xs.length - 1 && isKnown) close(position + 1);
  });
  return path;
}

// A logarithmic axis for both lengths of all pairs: from and to are 1, 2 or 5 times a power of ten.
export function lengthAxis(pairs) {
  const all = pairs.flat();
  const [least, most] = all.length === 0 ? [1, 1000] : [Math.min(...all), Math.max(...all)];
  const round = [];
  for (let power = -1; 10 ** power <= most * 10; power++) round.push(...[1, 2, 5].map((digit) => digit * 10 ** power));
  const from = round.findLast((value) => value <= least) ?? round[0];
  const to = Math.max(
    round.find((value) => value >= most),
    from * 10,
  );
  const between = round.filter((value) => value >= from && value <= to);
  const isLong = between.length > 7;
  return { from, to, ticks: isLong ? between.filter((value) => Number.isInteger(Math.log10(value))) : between };
}

function isNear(label, at, long) {
  return at.x < label.x + label.long && label.x < at.x + long && Math.abs(label.y - at.y) < 13;
}

function round(value) {
  return Math.round(value * 10) / 10;
}

// A chart over time in `box`, which it fills. Its cursor is moved by pointer or by keys, and tells `onCursor` seconds
// from now, or null.
export class TimeChart {
  #cursor = element("g");
  #size = { width: 0, height: 0 };
  #x = null;

  constructor(box, label, onCursor) {
    this.box = box;
    this.onCursor = onCursor;
    this.svg = element("svg", { "aria-hidden": "true" });
    box.replaceChildren(this.svg);
    Object.entries({ tabindex: "0", role: "slider", "aria-label": `Time in ${label}` }).forEach(([name, value]) =>
      box.setAttribute(name, value),
    );
    box.addEventListener("pointermove", (event) => this.#follow(event));
    box.addEventListener("pointerdown", (event) => this.#follow(event));
    box.addEventListener("pointerleave", () => onCursor(null));
    box.addEventListener("blur", () => onCursor(null));
    box.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  // spec: {past, future, largest, ticks, margins, layers, lanes, guides, readout(seconds)}; see `draw`.
  update(spec) {
    this.spec = spec;
    this.draw();
  }

  draw() {
    const { spec, svg } = this;
    const { width, height } = { width: this.box.clientWidth, height: this.box.clientHeight };
    if (spec === undefined || width < 80 || height < 30) return;
    this.#size = { width, height };
    const { left, right, top, bottom } = spec.margins;
    const plot = { left, right: width - right, top, bottom: height - bottom };
    const ticks = valueTicks(spec.largest, spec.mostTicks);
    const largest = spec.isTight ? spec.largest : ticks.at(-1);
    const x = (seconds) => plot.left + ((seconds + spec.past) / (spec.past + spec.future)) * (plot.right - plot.left);
    const y = (value) => plot.bottom - (value / largest) * (plot.bottom - plot.top);
    this.#x = { of: x, plot };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    // what a reader of the picture needs to turn points back into values
    svg.dataset.seconds = [-spec.past, spec.future].join(" ");
    svg.dataset.largest = largest;
    svg.dataset.plot = [plot.left, plot.top, plot.right, plot.bottom].join(" ");

    const nodes = [];
    const line = (name, x1, y1, x2, y2) => nodes.push(element("line", { class: name, x1, y1, x2, y2 }));
    const text = (name, at, value, anchor = "start") =>
      nodes.push(element("text", { class: name, x: round(at.x), y: round(at.y), "text-anchor": anchor }, value));
    for (const tick of ticks.filter((value) => value <= largest * 1.001)) {
      line(tick === 0 ? "axis" : "grid", plot.left, y(tick), plot.right, y(tick));
      text("tick", { x: plot.left - 6, y: y(tick) + 3.5 }, compact(tick), "end");
    }
    const clip = `clip-${this.box.id}`;
    nodes.push(
      element(
        "clipPath",
        { id: clip },
        element("rect", {
          x: plot.left,
          y: plot.top - 2,
          width: plot.right - plot.left,
          height: plot.bottom - plot.top + 4,
        }),
      ),
    );
    const layers = element("g", { "clip-path": `url(#${clip})` });
    for (const layer of spec.layers) {
      const xs = layer.times.map(x);
      const high = layer.values.map((value) => (value === null ? null : y(value)));
      const low = layer.from?.map((value) => (value === null ? null : y(value)));
      const path = layer.from ? areaPath(xs, low, high, layer.breaks) : linePath(xs, high, layer.breaks);
      layers.append(element("path", { class: layer.class, d: path }));
    }
    nodes.push(layers);
    for (const guide of spec.guides ?? []) {
      line(guide.class, x(Math.max(guide.from ?? -spec.past, -spec.past)), y(guide.value), plot.right, y(guide.value));
    }
    if (spec.future > 0) line("now", x(0), plot.top, x(0), height - (spec.lanes ? 0 : bottom));
    const placed = [];
    for (const label of spec.labels ?? []) {
      const [atX, atY] = [x(label.seconds), y(label.value)];
      if (label.dot) nodes.push(element("circle", { class: label.class, cx: atX, cy: atY, r: 3.5 }));
      // right of its point where there is room, else left of it, else where it fits
      const long = LETTER_WIDTH * label.text.length;
      const fits = { right: atX + 7 + long <= plot.right, left: atX - 7 - long >= plot.left };
      const start = fits.right ? atX + 7 : fits.left ? atX - 7 - long : Math.max(plot.left + 4, plot.right - long);
      const at = { x: start, y: Math.max(plot.top + 11, atY + (label.below ? 14 : -6)) };
      while (placed.some((other) => isNear(other, at, long))) at.y += 13;
      placed.push({ ...at, long });
      const isLeft = !fits.right && fits.left;
      text(`label ${label.class}`, isLeft ? { x: atX - 7, y: at.y } : at, label.text, isLeft ? "end" : "start");
    }
    if (spec.hasTimes) {
      const most = Math.max(2, Math.floor((plot.right - plot.left) / 64));
      for (const tick of timeTicks(spec.past, spec.future, most)) {
        line("axis", x(tick), plot.bottom, x(tick), plot.bottom + 4);
        const isLast = x(tick) > width - 24;
        if (isLast && tick !== 0) continue; // its text would reach into the one before
        const anchor = isLast ? "end" : "middle";
        text(tick === 0 ? "tick is-now" : "tick", { x: x(tick), y: plot.bottom + 15 }, timeLabel(tick), anchor);
      }
    }
    (spec.lanes ?? []).forEach((lane, row) => {
      const bottomOfLane = plot.bottom + 22 + (row + 1) * spec.laneHeight;
      line("grid", plot.left, bottomOfLane, x(0), bottomOfLane);
      text("tick", { x: plot.left - 6, y: bottomOfLane - 1 }, lane.label, "end");
      const most = Math.max(1, ...lane.counts.filter((value) => value !== null));
      const path = lane.counts
        .map((value, position) => {
          if (!(value > 0) || lane.times[position] < -spec.past) return "";
          const height = 4 + (Math.log1p(value) / Math.log1p(most)) * (spec.laneHeight - 6);
          return `M${round(x(lane.times[position]))} ${bottomOfLane}v${-round(height)}`;
        })
        .join("");
      nodes.push(element("path", { class: `mark ${lane.class}`, d: path }));
      text("tick", { x: x(0) + 6, y: bottomOfLane - 1 }, lane.note ?? "");
    });
    svg.replaceChildren(...nodes, this.#cursor);
    this.box.setAttribute("aria-valuemin", Math.round(-spec.past));
    this.box.setAttribute("aria-valuemax", Math.round(spec.future));
    this.showCursor(this.seconds ?? null);
  }

  showCursor(seconds) {
    this.seconds = seconds;
    const { spec } = this;
    if (spec === undefined || this.#x === null) return;
    const isInside = seconds !== null && seconds >= -spec.past && seconds <= spec.future;
    this.box.setAttribute("aria-valuenow", Math.round(isInside ? seconds : 0));
    this.box.setAttribute(
      "aria-valuetext",
      `${timeLabel(isInside ? seconds : 0)}: ${spec.readout(isInside ? seconds : 0)}`,
    );
    if (!isInside) {
      this.#cursor.replaceChildren();
      return;
    }
    const { of: x, plot } = this.#x;
    const at = round(x(seconds));
    const isRight = at > (plot.left + plot.right) / 2;
    const label = {
      class: "tick cursor",
      x: at + (isRight ? -5 : 5),
      y: plot.top + 9,
      "text-anchor": isRight ? "end" : "start",
    };
    this.#cursor.replaceChildren(
      element("line", { class: "cursor", x1: at, x2: at, y1: plot.top, y2: this.#size.height }),
      ...(spec.hasTimes ? [element("text", label, timeLabel(Math.round(seconds)))] : []),
    );
  }

  #follow(event) {
    if (this.#x === null) return;
    const { plot } = this.#x;
    const at = event.clientX - this.box.getBoundingClientRect().left;
    const share = (at - plot.left) / (plot.right - plot.left);
    const seconds = share * (this.spec.past + this.spec.future) - this.spec.past;
    this.onCursor(Math.min(this.spec.future, Math.max(-this.spec.past, seconds)));
  }

  #onKey(event) {
    if (this.spec === undefined) return;
    const { past, future } = this.spec;
    const step = (event.shiftKey ? 0.1 : 0.01) * (past + future);
    const now = this.seconds ?? 0;
    const moves = {
      ArrowLeft: now - Math.max(1, step),
      ArrowRight: now + Math.max(1, step),
      ArrowDown: now - Math.max(1, step),
      ArrowUp: now + Math.max(1, step),
      Home: -past,
      End: future,
      Escape: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const to = moves[event.key];
    this.onCursor(to === null ? null : Math.min(future, Math.max(-past, to)));
  }
}

// Predicted against actual lengths on logarithmic axes, with the diagonal. Older pairs are paler.
export class LengthChart {
  constructor(box) {
    this.box = box;
    this.svg = element("svg", { "aria-hidden": "true" });
    box.replaceChildren(this.svg);
    new ResizeObserver(() => this.draw()).observe(box);
  }

  update(pairs) {
    this.pairs = pairs;
    this.draw();
  }

  draw() {
    const [width, height] = [this.box.clientWidth, this.box.clientHeight];
    if (this.pairs === undefined || width < 80 || height < 60) return;
    const plot = { left: 56, right: width - 12, top: 8, bottom: height - 32 };
    const { from, to, ticks } = lengthAxis(this.pairs);
    const [low, high] = [Math.log(from), Math.log(to)];
    const x = (value) => plot.left + ((Math.log(value) - low) / (high - low)) * (plot.right - plot.left);
    const y = (value) => plot.bottom - ((Math.log(value) - low) / (high - low)) * (plot.bottom - plot.top);
    const nodes = [];
    const text = (at, value, anchor) =>
      nodes.push(element("text", { class: "tick", x: at.x, y: at.y, "text-anchor": anchor }, value));
    for (const value of ticks) {
      nodes.push(element("line", { class: "grid", x1: x(value), x2: x(value), y1: plot.top, y2: plot.bottom }));
      nodes.push(element("line", { class: "grid", x1: plot.left, x2: plot.right, y1: y(value), y2: y(value) }));
      text({ x: plot.left - 6, y: y(value) + 3.5 }, shortest(value), "end");
      text({ x: x(value), y: plot.bottom + 14 }, shortest(value), value === to ? "end" : "middle");
    }
    text({ x: (plot.left + plot.right) / 2, y: height - 4 }, "predicted tokens", "middle");
    const turned = { class: "tick", x: 0, y: 0, "text-anchor": "middle" };
    turned.transform = `translate(11 ${(plot.top + plot.bottom) / 2}) rotate(-90)`;
    nodes.push(element("text", turned, "actual tokens"));
    nodes.push(element("line", { class: "diagonal", x1: x(from), y1: y(from), x2: x(to), y2: y(to) }));
    // three paths: the oldest half, the next third, the newest
    const borders = [0, 0.5, 0.85, 1].map((share) => Math.floor(share * this.pairs.length));
    ["old", "middle", "new"].forEach((age, part) => {
      const chosen = this.pairs.slice(borders[part], borders[part + 1]);
      const path = chosen.map(([predicted, actual]) => `M${round(x(predicted))} ${round(y(actual))}h0`).join("");
      nodes.push(element("path", { class: `dots ${age}`, d: path }));
    });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...nodes);
  }
}
