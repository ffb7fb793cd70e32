// The page: what the visitor does, and the figures of one history in its elements.

import { LengthChart, TimeChart, timeLabel } from "./charts.mjs";
import { MAX_BYTES, Player, historyAt, parseRecording } from "./replay.mjs";
import { compact, count, duration, milliseconds, percent, price, speed, timeLeft } from "./samples.mjs";
import * as samples from "./samples.mjs";
import { LiveStream, STALE_SECONDS } from "./stream.mjs";
import { TERMS } from "./terms.mjs";

const KEY = "toka-key";
const THEME = "toka-theme";
const MEAN_OF = 5; // seconds over which the large figures of throughput are means
const PARTS_OF = 15;
const NEAR_LIMIT = 0.9; // share of the pool's limit from which on its line is red
const TABLE_ROWS = 60;

const at = (id) => document.getElementById(id);

// --- what is shown ---

const view = { history: [], replica: null, past: null, cursor: null, player: null, isReplay: false };
let live = [];

// Sets text only where it changes: a screen reader and a selection stay undisturbed.
function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function make(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function setWidth(node, share) {
  node.style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
  return node;
}

// Replaces the children where they differ from what is there.
function replace(parent, nodes) {
  const holder = make(parent.localName, {}, ...nodes);
  if (holder.innerHTML !== parent.innerHTML) parent.replaceChildren(...holder.childNodes);
}

function showHeader(sample) {
  const server = sample.server ?? {};
  say("model", server.model ?? "");
  const sizes = [
    ["dp", server.dp_size],
    ["pp", server.pp_size],
    ["tp", server.tp_size],
  ];
  const facts = [
    server.version,
    [server.device, server.dtype].filter(Boolean).join(" "),
    ...sizes.filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`),
    Number.isFinite(server.started) ? `up ${duration(Math.max(0, sample.time - server.started))}` : null,
    server.draining ? "draining: takes no new requests" : null,
  ];
  say("facts", facts.filter(Boolean).join(" · "));
}

function showReplicaChoice(sample) {
  const replicas = sample.replicas ?? [];
  at("replica-choice").hidden = replicas.length < 2;
  if (view.replica !== null && !replicas.some((one) => one.index === view.replica)) view.replica = null;
  const options = [["", `all ${replicas.length}`], ...replicas.map((one) => [String(one.index), String(one.index)])];
  replace(
    at("replica"),
    options.map(([value, text]) => make("option", { value }, text)),
  );
  at("replica").value = view.replica === null ? "" : String(view.replica);
}

function showTiles(sample, series, forecast) {
  const last = (name) => series[name].at(-1) ?? null;
  const replicas = samples.replicasOf(sample, view.replica);
  const total = (read) => samples.sum(replicas.map(read));
  say("generated", speed(samples.recentMean(series, "generated", MEAN_OF)));
  say("generated-note", `${compact(total((one) => one.tokens?.generated))} since the start`);
  say("prompt", speed(samples.recentMean(series, "prompt", MEAN_OF)));
  const cached = samples.cachedShare(view.history, view.replica);
  say("prompt-note", cached === null ? "" : `${percent(cached)} from the cache`);
  say("running", count(last("running")));
  say("slots", last("slots") === null ? "" : `of ${count(last("slots"))}`);
  const kinds = [
    [last("prefilling"), "prefilling"],
    [last("background"), "background"],
  ];
  say(
    "running-note",
    kinds
      .filter(([number]) => number > 0)
      .map(([number, kind]) => `${count(number)} ${kind}`)
      .join(" · "),
  );
  say("waiting", count(last("waiting")));
  const oldest = samples.oldestWait(sample, view.replica);
  say("waiting-note", oldest === null ? "" : `oldest ${duration(oldest)}`);
  say("pool", percent(last("inUse") / last("total")));
  say("pool-note", forecast === null ? "" : `peak to come: ${percent(forecast.peak / forecast.limit)}`);
  const eta = samples.etaOf(sample, view.replica);
  say("eta", timeLeft(eta));
  say("eta-note", eta === null ? "" : "by predicted lengths");
  const requests = sample.requests ?? {};
  say("open", count(requests.open));
  const ends = ["answered", "aborted", "failed"].filter((name) => requests[name] > 0 || name === "answered");
  say("open-note", ends.map((name) => `${compact(requests[name])} ${name}`).join(" · "));
}

// --- charts over time ---

const moveCursor = (seconds) => {
  view.cursor = seconds;
  for (const chart of timeCharts) chart.showCursor(seconds);
  showReadouts();
};
const poolChart = new TimeChart(at("pool-plot"), "the KV pool", moveCursor);
const lengthChart = new LengthChart(at("lengths-plot"));

const STRIPS = [
  { name: "generated", label: "Generated", unit: "tokens/s", color: "own", text: speed },
  { name: "prompt", label: "Prompts", unit: "tokens/s", color: "shared", text: speed },
  { name: "running", label: "Running", unit: "sequences", color: "own", text: count, inner: "prefilling" },
  { name: "waiting", label: "Waiting", unit: "sequences", color: "waiting", text: count },
  { name: "queueDepth", label: "Steps in flight", unit: "steps", color: "soft", text: count },
];
for (const strip of STRIPS) {
  const box = make("div", { class: "plot", id: `strip-${strip.name}` });
  strip.value = make("b", {});
  strip.note = make("span", {});
  const title = make(
    "p",
    {},
    make("span", {}, strip.label),
    make("span", {}, strip.note, strip.value, ` ${strip.unit}`),
  );
  at("strips").append(make("div", { class: "strip" }, title, box));
  strip.chart = new TimeChart(box, strip.label, moveCursor);
}
const timeCharts = [poolChart, ...STRIPS.map((strip) => strip.chart)];

let shown = null; // what the readouts need: {series, times, forecast, earlier}

// The position of the last event at or before `seconds` from now; null in the future.
function positionOf(seconds) {
  if (seconds > 0) return null;
  const position = shown.times.findLastIndex((time) => time <= seconds + 0.5);
  return position === -1 ? null : position;
}

function blocksOf(curve, seconds) {
  const value = curve === null ? null : samples.valueAt(curve, seconds);
  return value === null ? null : Math.round(value);
}

function poolReadout(seconds) {
  const position = positionOf(seconds);
  const { series, forecast, earlier } = shown;
  const past = (name) => (position === null ? null : series[name][position]);
  return {
    ...Object.fromEntries(["used", "own", "shared", "cached", "free"].map((name) => [name, past(name)])),
    forecast: seconds >= 0 ? blocksOf(forecast, seconds) : null,
    earlier: blocksOf(earlier, seconds),
  };
}

const POOL_WORDS = {
  used: "in use",
  own: "own",
  shared: "shared",
  cached: "cached",
  free: "free",
  forecast: "forecast",
  earlier: "forecast a minute ago",
};
const POOL_HELP = {
  used: "blocks that sequences use: which of them several use is not known of the time before this page was open",
  own: TERMS["own block"],
  shared: TERMS["shared block"],
  cached: TERMS["cached block"],
  free: TERMS["free block"],
  forecast: TERMS["KV forecast"],
  earlier: "what was forecast for the sequences that ran then; those admitted since add to it",
};

function showReadouts() {
  if (shown === null) return;
  const seconds = view.cursor ?? 0;
  const readout = poolReadout(seconds);
  // of the time before the page was open, only the sum of own and shared blocks is known
  const hidden = readout.used === null ? ["used"] : ["own", "shared"];
  const words = Object.entries(POOL_WORDS).filter(([name]) => !hidden.includes(name));
  const items = words.map(([name, words]) => {
    const kind = name === "forecast" || name === "earlier" ? "key line" : "key";
    const key = make("span", { class: `${kind} ${name}`, "aria-hidden": "true" });
    return make("li", { title: POOL_HELP[name] }, key, `${words} `, make("b", {}, count(readout[name])));
  });
  replace(at("pool-legend"), items);
  const position = positionOf(seconds);
  for (const strip of STRIPS) {
    const value = position === null ? null : shown.series[strip.name][position];
    strip.value.textContent = strip.text(value);
    const inner = strip.inner && position !== null ? shown.series[strip.inner][position] : null;
    strip.note.textContent = inner > 0 ? `${count(inner)} ${strip.inner} · ` : "";
  }
}

function poolText(seconds) {
  const known = Object.entries(poolReadout(seconds)).filter(([, value]) => value !== null);
  return known.map(([name, value]) => `${POOL_WORDS[name]} ${count(value)}`).join(", ") || "not known";
}

function showPool(series, times, forecast, earlier, span) {
  const total = series.total.at(-1) ?? 0;
  const limit = forecast?.limit ?? total;
  const inUse = Math.max(1, forecast?.peak ?? 0, ...(earlier?.blocks ?? []), ...series.inUse);
  // a pool that is almost empty is drawn larger
  const isLarge = inUse < 0.35 * total;
  const largest = isLarge ? inUse * 1.5 : Math.max(total, limit, inUse);
  const breaks = series.isAfterGap;
  const used = series.inUse;
  const filled = series.time.map((_, position) => samples.sum([used[position], series.cached[position]]));
  const zeros = series.time.map(() => 0);
  const isUndivided = (i) => series.own[i] === null || (i > 0 && series.own[i - 1] === null);
  const undivided = used.map((value, i) => (isUndivided(i) ? value : null));
  const layers = [
    { class: "area-cached", times, values: filled, from: used, breaks },
    { class: "area-used", times, values: undivided, from: zeros, breaks },
    { class: "edge-cached", times, values: filled, breaks },
    { class: "area-shared", times, values: used, from: series.own, breaks },
    { class: "area-own", times, values: series.own, from: zeros, breaks },
    { class: "edge-own", times, values: series.own, breaks },
    { class: "edge-used", times, values: used, breaks },
  ];
  const labels = [];
  const guides = [];
  if (forecast !== null) {
    const ahead = { times: forecast.seconds, values: forecast.blocks };
    layers.push({ class: "area-forecast", ...ahead, from: forecast.blocks.map(() => 0) });
    if (earlier !== null) layers.push(...earlierLayers(earlier));
    layers.push({ class: "halo", ...ahead }, { class: "forecast", ...ahead });
    const peak = `peak ${count(forecast.peak)} (${percent(forecast.peak / limit)}) ${timeLabel(forecast.peakSeconds)}`;
    labels.push({ class: "forecast", seconds: forecast.peakSeconds, value: forecast.peak, text: peak, dot: true });
  } else if (earlier !== null) layers.push(...earlierLayers(earlier));
  if (limit > 0) {
    const isNear = Math.max(forecast?.peak ?? 0, used.at(-1) ?? 0) >= NEAR_LIMIT * limit;
    const limitClass = isNear ? "limit near" : "limit";
    guides.push({ class: limitClass, value: limit });
    const text = `limit ${count(limit)} blocks`;
    labels.push({
      class: limitClass,
      seconds: -span.past,
      value: Math.min(limit, largest),
      text,
      anchor: "start",
      below: true,
    });
  }
  const lane = (name) => {
    const counts = series[name].filter((_, i) => times[i] >= -span.past);
    // nothing happens while the replicas start, and nothing is counted before the first event
    const isUnknown = (number, i) => i > 0 && number === null && series.running[i] !== null && times[i] >= -span.past;
    const isWhole = !series[name].some(isUnknown);
    const note = `${isWhole ? "" : "≥ "}${compact(samples.sum(counts) ?? 0)}`;
    return { label: name, class: name, counts: series[name], times, note };
  };
  poolChart.update({
    ...span,
    largest,
    isTight: !isLarge,
    mostTicks: 5,
    margins: { left: 72, right: 12, top: 8, bottom: 86 },
    layers,
    guides: isLarge ? [] : guides,
    labels: isLarge
      ? labels.map((one) => (one.class.startsWith("limit") ? { ...one, text: `${one.text} (above)` } : one))
      : labels,
    lanes: ["admitted", "preempted", "evicted", "failed"].map(lane),
    laneHeight: 16,
    hasTimes: true,
    readout: poolText,
  });
}

function earlierLayers(earlier) {
  const line = { times: earlier.seconds, values: earlier.blocks };
  return [
    { class: "halo", ...line },
    { class: "earlier", ...line },
  ];
}

function showStrips(series, times, span) {
  STRIPS.forEach((strip, position) => {
    const values = series[strip.name];
    const isLast = position === STRIPS.length - 1;
    const zeros = values.map(() => 0);
    const breaks = series.isAfterGap;
    const layers = [
      { class: `fill-${strip.color}`, times, values, from: zeros, breaks },
      { class: `line-${strip.color}`, times, values, breaks },
    ];
    if (strip.inner) layers.push({ class: "area-forecast", times, values: series[strip.inner], from: zeros, breaks });
    const visible = values.filter((value, i) => value !== null && times[i] >= -span.past);
    strip.chart.update({
      past: span.past,
      future: 0,
      largest: Math.max(1, ...visible),
      mostTicks: 2,
      margins: { left: 46, right: 8, top: 9, bottom: isLast ? 20 : 4 },
      layers,
      hasTimes: isLast,
      readout: (seconds) => {
        const found = positionOf(Math.min(0, seconds));
        return `${strip.text(found === null ? null : values[found])} ${strip.unit}`;
      },
    });
  });
}

// --- the other figures ---

function showLengths() {
  const pairs = samples.lengthPairs(view.history, view.replica);
  const summary = samples.ratioSummary(pairs);
  say("lengths-summary", summary === null ? "No lengths are known yet." : lengthsText(summary, pairs.length));
  lengthChart.update(pairs);
}

function lengthsText({ median, low, high }, number) {
  const [middle, least, most] = [median, low, high].map((value) => (value < 9.95 ? value.toFixed(2) : count(value)));
  return `actual / predicted: median ${middle}, 80 % within ${least} to ${most} (${count(number)} sequences)`;
}

const GROUP_NAMES = { manager: "Manager", device: "Device", phases: "Phases of the forward" };
const GROUP_VERBS = { manager: "works" };

function showParts() {
  const groups = samples.partsOf(view.history, view.replica, PARTS_OF);
  const replicas = samples.replicasOf(view.history.at(-1), view.replica);
  const times = replicas.map((one) => one.step_seconds).filter(Number.isFinite);
  const mean = times.length === 0 ? null : samples.sum(times) / times.length;
  say(
    "parts-summary",
    groups.length === 0 ? "Not known yet." : `a decode step takes ${milliseconds(mean)} · means of ${PARTS_OF} s`,
  );
  const microbatches = samples.microbatchesOf(view.history.at(-1), view.replica);
  replace(
    at("parts"),
    groups.map((group) => partsGroup(group, microbatches[group.name])),
  );
}

function partsGroup({ name, parts, perStep, ofTime }, microbatches) {
  const classOf = (part, position) =>
    ["idle", "waiting", "others"].includes(part.name) ? "part-idle" : `part-${(position % 8) + 1}`;
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  const list = make("ul", {});
  parts.forEach((part, position) => {
    bar.append(setWidth(make("i", { class: classOf(part, position) }), part.share));
    const key = make("span", { class: `key ${classOf(part, position)}`, "aria-hidden": "true" });
    const value = part.perStep === null ? percent(part.share) : milliseconds(part.perStep);
    list.append(make("li", {}, key, `${words(part.name)} `, make("b", {}, value)));
  });
  const whole = [
    ofTime === null ? null : `${GROUP_VERBS[name] ?? "is busy"} ${percent(ofTime)} of the time`,
    perStep === null ? null : milliseconds(perStep),
    microbatches === undefined ? null : `${microbatches} microbatches in flight`,
  ];
  const title = make(
    "p",
    {},
    make("b", {}, GROUP_NAMES[name] ?? words(name)),
    make("span", {}, whole.filter(Boolean).join(" · ")),
  );
  return make("div", { class: "group" }, title, bar, list);
}

function words(name) {
  return name.replaceAll("_", " ");
}

function showReplicas(sample, history) {
  const replicas = sample.replicas ?? [];
  at("replicas").hidden = replicas.length < 2;
  if (replicas.length < 2) return;
  const recent = history.slice(-MEAN_OF - 1);
  const rows = replicas.map((one) => {
    const generated = samples.recentMean(samples.seriesOf(recent, one.index), "generated", MEAN_OF);
    const used = samples.sum([one.blocks?.own, one.blocks?.shared]);
    const share = used === null ? null : used / one.blocks.total;
    const meter = make("span", { class: "meter", "aria-hidden": "true" }, setWidth(make("i", {}), share ?? 0));
    const cells = [
      [count(one.index)],
      [one.state ?? "–"],
      [`${speed(generated)} tokens/s`],
      [count(one.running)],
      [count(one.waiting)],
      [meter, percent(share)],
      [timeLeft(one)],
      [count(one.restarts)],
    ];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, ...cell)));
  });
  replace(at("replica-rows"), rows);
}

function showOldest(sample) {
  const requests = samples.oldestRequests(sample, view.replica);
  at("oldest").hidden = requests.length === 0;
  const rows = requests.map((one) => {
    const isWaiting = one.state === "waiting";
    const number = one.samples > 1 ? `${count(one.running)} of ${count(one.samples)}` : count(one.running);
    const cells = [
      one.id ?? "–",
      one.client || "–",
      one.state ?? "–",
      number,
      count(one.prompt_tokens),
      count(one.generated_tokens),
      isWaiting ? "–" : duration(one.age_seconds),
      duration(one.wait_seconds),
    ];
    return make("tr", {}, ...cells.map((text, column) => make("td", column < 3 ? { class: "name" } : {}, text)));
  });
  replace(at("oldest-rows"), rows);
}

function showKeys(sample) {
  const keys = samples.keysOf(sample);
  at("keys").hidden = keys.length === 0;
  const rows = keys.map((one) => {
    const numbers = [one.running, one.waiting, one.tokens?.prompt, one.tokens?.generated].map(count);
    const name = make("td", { class: "name" }, one.name ?? "others, such as batches");
    return make("tr", {}, name, ...numbers.map((number) => make("td", {}, number)));
  });
  replace(at("key-rows"), rows);
}

function showJobs(sample) {
  const jobs = sample.jobs ?? [];
  at("jobs").hidden = jobs.length === 0;
  at("main").classList.toggle("has-jobs", jobs.length > 0);
  replace(
    at("job-rows"),
    jobs.map((job) => jobRow(job, sample.time)),
  );
}

function linesText(finished, total, job) {
  if (Number.isFinite(total)) return `${count(finished)} of ${count(total)} lines`;
  return Number.isFinite(job.ended) ? `${count(finished)} lines` : `${count(finished)} of an unknown number of lines`;
}

function jobRow(job, now) {
  const lines = job.lines ?? {};
  const share = samples.jobShare(job);
  const failed = share === null ? 0 : (lines.failed ?? 0) / lines.total;
  const name = job.name || job.id || "";
  const progress = make(
    "div",
    {
      class: "progress",
      role: "progressbar",
      "aria-label": `Progress of ${name}`,
      "aria-valuemin": "0",
      "aria-valuemax": "100",
    },
    setWidth(make("i", {}), share === null ? 0 : share - failed),
    setWidth(make("i", { class: "failed" }), failed),
  );
  if (share !== null) progress.setAttribute("aria-valuenow", Math.round(100 * share));
  const finished = (lines.done ?? 0) + (lines.failed ?? 0);
  const cost = job.cost ?? {};
  const figures = [
    linesText(finished, lines.total, job),
    lines.failed > 0 ? `${count(lines.failed)} failed` : null,
    lines.running > 0 ? `${count(lines.running)} running` : null,
    job.state === "running" && Number.isFinite(job.tokens_per_second) ? `${speed(job.tokens_per_second)} tokens/s` : null,
    Number.isFinite(job.tokens?.generated) ? `${compact(job.tokens.generated)} generated` : null,
    Number.isFinite(cost.device_seconds) ? `cost: ${duration(cost.device_seconds)} of the device` : null,
    Number.isFinite(cost.price) ? `price ${price(cost.price)}` : null,
  ];
  const state = [
    job.kind,
    job.state,
    share === null ? null : percent(share),
    Number.isFinite(job.eta_seconds) ? `${timeLeft(job)} left` : null,
    Number.isFinite(job.ended) ? `${duration(Math.max(0, now - job.ended))} ago` : null,
  ];
  return make(
    "li",
    { class: `is-${job.state}` },
    make(
      "div",
      { class: "title" },
      make("b", { title: job.id ?? "" }, name),
      make("span", {}, state.filter(Boolean).join(" · ")),
    ),
    progress,
    make("div", { class: "figures" }, ...figures.filter(Boolean).map((figure) => make("span", {}, figure))),
    ...(job.reason ? [make("p", { class: "reason" }, job.reason)] : []),
  );
}

// --- tables in place of charts over time ---

function showTables(series, times) {
  const isOn = at("tables").getAttribute("aria-pressed") === "true";
  for (const [table, chart] of [
    ["pool-table", "pool-plot"],
    ["strips-table", "strips"],
  ]) {
    at(table).hidden = !isOn;
    at(chart).hidden = isOn;
  }
  if (!isOn) return;
  const past = times
    .map((time, position) => [time, position])
    .slice(-TABLE_ROWS)
    .reverse();
  const { forecast, earlier } = shown;
  const ahead = forecast === null ? [] : sampled(forecast.seconds, 20).reverse();
  const blank = Array(7).fill("–");
  showTable(
    "pool-table",
    ["Time", "Own", "Shared", "Cached", "Free", "Admitted", "Preempted", "Evicted blocks", "Forecast", "A minute ago"],
    [
      ...ahead.map((time) => [
        timeLabel(time),
        ...blank,
        count(blocksOf(forecast, time)),
        count(earlier && blocksOf(earlier, time)),
      ]),
      ...past.map(([time, i]) => [
        timeLabel(Math.round(time)),
        ...["own", "shared", "cached", "free", "admitted", "preempted", "evicted"].map((name) =>
          count(series[name][i]),
        ),
        "–",
        count(earlier && blocksOf(earlier, time)),
      ]),
    ],
  );
  showTable(
    "strips-table",
    ["Time", ...STRIPS.map((strip) => strip.label)],
    [
      ...past.map(([time, i]) => [
        timeLabel(Math.round(time)),
        ...STRIPS.map((strip) => strip.text(series[strip.name][i])),
      ]),
    ],
  );
}

function sampled(values, most) {
  const step = Math.max(1, Math.ceil(values.length / most));
  return values.filter((_, position) => position % step === 0 || position === values.length - 1);
}

function showTable(id, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text))));
  at(id).replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

// --- one event ---

function show() {
  const { history, replica } = view;
  const sample = history.at(-1);
  if (sample === undefined || document.hidden) return;
  showReplicaChoice(sample);
  const series = samples.seriesOf(history, view.replica);
  const times = series.time.map((time) => time - sample.time);
  const forecast = samples.forecastOf(sample, view.replica);
  const earlier = samples.earlierForecast(history, view.replica);
  shown = { series, times, forecast, earlier };
  const span = samples.timeWindow(history, view.replica, view.past);
  at("main").dataset.time = sample.time;
  showHeader(sample);
  showTiles(sample, series, forecast);
  const [what, why] = samples.nextSentences(sample, view.replica);
  say("next-what", what);
  say("next-why", why);
  showPool(series, times, forecast, earlier, span);
  showStrips(series, times, span);
  showTables(series, times);
  showReadouts();
  showLengths();
  showParts();
  showReplicas(sample, history);
  showOldest(sample);
  showKeys(sample);
  showJobs(sample);
}

// --- the connection ---

let state = { name: "connecting", detail: {} };
let lastEvent = 0;
let isStale = false;
let why = ""; // the connection ended

function setState(name, detail = {}) {
  const isNew = name !== state.name;
  state = { name, detail };
  if (name === "live") isStale = false;
  if (name === "live") why = "";
  else if (detail.why !== undefined) why = detail.why;
  showState();
  if (isNew) say("said", `Connection: ${[stateText(), lostText()].filter(Boolean).join(". ")}`);
  if (isNew && name === "key") askKey(detail.wasGiven);
  notify(name === "refused" ? `The server refuses the figures: ${detail.why}.` : null);
}

function stateText() {
  const { name, detail } = state;
  const left = detail.until === undefined ? 0 : Math.max(0, Math.ceil((detail.until - Date.now()) / 1000));
  if (name === "live" && isStale) return `no event for ${Math.round((Date.now() - lastEvent) / 1000)} s`;
  if (name === "reconnecting") return `reconnecting in ${left} s`;
  if (name === "gone") return `server gone, next try in ${left} s`;
  return { key: "needs the API key", refused: "refused" }[name] ?? name;
}

// Whether the figures are no longer those of now.
function isLost() {
  return !view.isReplay && (state.name === "live" ? isStale : lastEvent > 0 || why !== "");
}

// With the date if it is half a day ago.
function timeOf(milliseconds) {
  const when = new Date(milliseconds);
  const time = when.toLocaleTimeString([], { hourCycle: "h23" });
  return Date.now() - milliseconds < 12 * 3600 * 1000 ? time : `${when.toLocaleDateString()} ${time}`;
}

// What has happened, and since when; "" while figures come.
function lostTitle() {
  if (!isLost()) return "";
  if (lastEvent === 0) return "No answer";
  const ended = live.at(-1)?.server?.ended;
  return ended ? `Server ended at ${timeOf(lastEvent)}` : `No answer since ${timeOf(lastEvent)}`;
}

function lostText() {
  const ended = live.at(-1)?.server?.ended;
  const reason = ended || why;
  const facts = `${lostTitle()}${reason === "" ? "" : `: ${reason}`}.`;
  if (!isLost()) return "";
  return lastEvent === 0 ? facts : `${facts} The figures are those of that time.`;
}

function showState() {
  at("state").dataset.state = state.name === "live" && isStale ? "stale" : state.name;
  say("state-text", stateText());
  at("try").hidden = !["reconnecting", "gone", "refused", "key"].includes(state.name);
  at("try").textContent = state.name === "key" ? "Enter key" : "Try now";
  at("forget").hidden = sessionStorage.getItem(KEY) === null;
  at("lost").hidden = !isLost();
  say("lost", lostText());
  at("main").classList.toggle("is-old", isLost());
  showTitle();
}

function showTitle() {
  const model = (view.isReplay ? view.history : live).at(-1)?.server?.model;
  const title = [lostTitle(), model, "tokasaurus"].filter(Boolean).join(" – ");
  if (document.title !== title) document.title = title;
}

function notify(text) {
  at("notice").hidden = text === null;
  at("notice").textContent = text ?? "";
}

function onData(text) {
  lastEvent = Date.now();
  let sample = null;
  try {
    sample = JSON.parse(text);
  } catch {
    // a broken event is skipped like one in a newer format
  }
  if (!samples.isSample(sample)) {
    notify("The server sends figures in a format that this page does not know. Load the page again.");
    return;
  }
  live = samples.appendSample(live, sample);
  view.history = live;
  showTitle();
  show();
}

const stream = new LiveStream("live", () => sessionStorage.getItem(KEY), onData, setState);

setInterval(() => {
  if (view.isReplay) return;
  const silence = Date.now() - lastEvent;
  isStale = state.name === "live" && silence > 1000 * STALE_SECONDS;
  if (state.name === "live" && silence > 4000 * STALE_SECONDS) stream.renew();
  if (state.name !== "live" || isStale || at("state").dataset.state === "stale") showState();
}, 1000);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  stream.hurry();
  show();
});
window.addEventListener("online", () => stream.hurry());
at("try").addEventListener("click", () => (state.name === "key" ? askKey(false) : stream.start()));

function askKey(wasGiven) {
  if (wasGiven) {
    sessionStorage.removeItem(KEY);
    at("key-why").textContent = "The server refused that key. Give another one.";
  }
  at("key").value = "";
  if (!at("key-dialog").open) at("key-dialog").showModal();
  at("key").focus();
}

at("key-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key").value = "";
  stream.start();
});
at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  live = [];
  lastEvent = 0;
  view.history = view.isReplay ? view.history : live;
  if (view.isReplay) showState();
  else stream.start();
});

// --- replay ---

function openReplay() {
  view.isReplay = true;
  stream.stop();
  at("replay").hidden = false;
  at("open-replay").hidden = true;
  notify(null);
  setState("replay");
  if (view.player === null) at("file").focus();
  else onMove(view.player);
}

function closeReplay() {
  view.player?.pause();
  view.isReplay = false;
  view.history = live;
  at("replay").hidden = true;
  at("open-replay").hidden = false;
  stream.start();
  show();
  at("open-replay").focus();
}

async function openFile(file) {
  if (!view.isReplay) openReplay();
  view.player?.pause();
  try {
    if (file.size > MAX_BYTES) throw new Error("it is larger than 256 MiB");
    const recorded = parseRecording(await file.text());
    view.player = new Player(recorded, onMove);
    view.player.speed = Number(at("speed").value);
    at("scrub").max = Math.ceil(1000 * view.player.length);
    at("player").hidden = false;
    say("file-name", "Recording");
    notify(null);
    say("said", `Replays ${file.name}, ${recorded.length} events`);
    view.player.play();
  } catch (error) {
    notify(`${file.name} cannot be replayed: ${error.message}.`);
  }
}

function onMove(player) {
  if (!view.isReplay) return;
  const { position, samples: recorded } = player;
  view.history = historyAt(recorded, position);
  say("play", player.isPlaying ? "Pause" : "Play");
  at("scrub").value = 1000 * player.seconds;
  const when = new Date(1000 * recorded[position].time);
  const text = `${clock(player.seconds)} of ${clock(player.length)}`;
  say("position", `${text} · ${when.toLocaleTimeString()}`);
  at("scrub").setAttribute("aria-valuetext", text);
  showTitle();
  show();
}

function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

at("open-replay").addEventListener("click", openReplay);
at("close-replay").addEventListener("click", closeReplay);
at("file").addEventListener("change", (event) => event.target.files[0] && openFile(event.target.files[0]));
at("play").addEventListener("click", () => (view.player.isPlaying ? view.player.pause() : view.player.play()));
at("scrub").addEventListener("input", (event) => view.player.seek(Number(event.target.value) / 1000));
at("speed").addEventListener("change", (event) => {
  view.player.speed = Number(event.target.value);
});
let dragDepth = 0;
window.addEventListener("dragenter", (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  dragDepth += 1;
  at("drop").hidden = false;
});
window.addEventListener("dragleave", () => {
  dragDepth = Math.max(0, dragDepth - 1);
  at("drop").hidden = dragDepth === 0;
});
window.addEventListener("dragover", (event) => event.preventDefault());
window.addEventListener("drop", (event) => {
  event.preventDefault();
  dragDepth = 0;
  at("drop").hidden = true;
  if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]);
});

// --- words ---

document.querySelectorAll("button.terms").forEach((button, position) => {
  const list = make("dl", {});
  for (const term of button.dataset.terms.split(", ")) {
    list.append(make("dt", {}, term), make("dd", {}, TERMS[term].replaceAll("`", "")));
  }
  const panel = make("div", { id: `terms-${position}`, class: "words", popover: "", tabindex: "0" }, list);
  button.after(panel);
  button.popoverTargetElement = panel;
});

// --- choices ---

at("replica").addEventListener("change", (event) => {
  view.replica = event.target.value === "" ? null : Number(event.target.value);
  show();
});
at("past").addEventListener("change", (event) => {
  view.past = event.target.value === "" ? null : Number(event.target.value);
  show();
});
at("tables").addEventListener("click", () => {
  const isOn = at("tables").getAttribute("aria-pressed") === "true";
  at("tables").setAttribute("aria-pressed", String(!isOn));
  show();
});

const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (darkSystem.matches ? "dark" : "light")) === "dark";
function showTheme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen === null) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  say("theme", isDark() ? "Light" : "Dark");
}
at("theme").addEventListener("click", () => {
  const wanted = isDark() ? "light" : "dark";
  // a choice that is the system's follows the system again
  if ((wanted === "dark") === darkSystem.matches) localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, wanted);
  showTheme();
});
darkSystem.addEventListener("change", showTheme);
showTheme();

// From a file, the page only replays.
if (location.protocol === "file:") {
  at("close-replay").hidden = true;
  openReplay();
} else if (new URLSearchParams(location.search).has("replay")) openReplay();
else stream.start();
