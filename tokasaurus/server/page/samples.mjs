// What the page shows, computed from the events of /live. Pure functions: no document, no clock.
//
// A history is an array of events in the order of their times. `replica` is a replica's index, or null for the sum.

export const FORMAT = 1;
export const HISTORY_SECONDS = 900;
const MAX_OLDEST = 8; // requests of a kind in the table of the oldest ones
export const COMPARED_SECONDS = 60; // age of the older forecast that is drawn beside the present one
const MAX_SAMPLES = 1000;
const KEPT_SECONDS = 5; // how long a figure stays that a replica leaves out
const PAST_SECONDS = 5; // between two events of the server's own past
const GAP_SECONDS = 5; // a longer pause between two events breaks the lines
const PAST_GAP_SECONDS = 2.2 * PAST_SECONDS; // if one of them is of that past
const MAX_PAIRS = 1500;
const NICE_SECONDS = [30, 60, 120, 180, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];

export function isSample(value) {
  return typeof value === "object" && value !== null && Number.isFinite(value.time) && value.format === FORMAT;
}

// What a replica tells only now and then, if its manager is busy. Events between have the newest known for a while.
const KEPT = [
  "blocks",
  "forecast",
  "step_seconds",
  "next",
  "slots",
  "prefilling",
  "eta_seconds",
  "eta_range",
  "oldest_wait_seconds",
  "oldest",
];

// The event with what its replicas left out, as the event before it had it; `known_at` is the time of that.
export function completed(before, sample) {
  const kept = new Map((before?.replicas ?? []).map((one) => [one.index, one]));
  const complete = (one) => {
    const older = kept.get(one.index);
    const knownAt = older?.known_at ?? before?.time;
    const isNew = one.forecast !== undefined || older?.forecast === undefined;
    if (isNew || older.restarts !== one.restarts || !(sample.time - knownAt <= KEPT_SECONDS)) return one;
    return { ...Object.fromEntries(KEPT.map((name) => [name, older[name]])), ...one, known_at: knownAt };
  };
  return sample.replicas ? { ...sample, replicas: sample.replicas.map(complete) } : sample;
}

// The history with one more event, without what is older than 15 minutes. Starts again if the clock was set back.
export function appendSample(history, sample) {
  const { past, ...present } = sample;
  const isOtherClock = sample.time <= history.at(-1)?.time;
  const whole = withPast(isOtherClock ? [] : history, past ?? [], sample.time);
  const last = isOtherClock ? undefined : history.at(-1);
  const first = Math.max(0, whole.length + 1 - MAX_SAMPLES);
  const kept = whole.slice(first).filter((one) => one.time >= sample.time - HISTORY_SECONDS);
  return [...kept, completed(last, present)];
}

// The history with what the server remembers where the history has nothing.
function withPast(history, past, now) {
  if (past.length === 0) return history;
  const isMissing = ({ time }) => history.every((one) => Math.abs(one.time - time) >= PAST_SECONDS);
  const moments = past.filter((one) => Number.isFinite(one?.time) && one.time < now && isMissing(one));
  return [...history, ...moments.map((one) => ({ ...one, isPast: true }))].sort((a, b) => a.time - b.time);
}

export function replicasOf(sample, replica) {
  const all = sample?.replicas ?? [];
  return replica === null ? all : all.filter((one) => one.index === replica);
}

// Null unless one of the values is a number.
export function sum(values) {
  const known = values.filter(Number.isFinite);
  return known.length === 0 ? null : known.reduce((total, value) => total + value, 0);
}

function sumOf(replicas, read) {
  return sum(replicas.map((one) => read(one)));
}

// How far a total has grown. A smaller total has started at 0 again since.
export function increase(before, now) {
  if (!Number.isFinite(before) || !Number.isFinite(now)) return null;
  return now >= before ? now - before : now;
}

// Growth per second of a total, summed over the replicas; null for a replica that the earlier event lacks.
function rate(earlier, sample, replica, read) {
  const before = new Map(replicasOf(earlier, replica).map((one) => [one.index, one]));
  const grown = sumOf(replicasOf(sample, replica), (one) =>
    before.has(one.index) ? increase(read(before.get(one.index)), read(one)) : null,
  );
  return grown === null ? null : grown / (sample.time - earlier.time);
}

const GAUGES = {
  running: (one) => one.running,
  prefilling: (one) => one.prefilling,
  background: (one) => one.background,
  waiting: (one) => one.waiting,
  slots: (one) => one.slots,
  queueDepth: (one) => one.queue_depth,
  used: (one) => one.blocks?.used,
  own: (one) => one.blocks?.own,
  shared: (one) => one.blocks?.shared,
  cached: (one) => one.blocks?.cached,
  free: (one) => one.blocks?.free,
  total: (one) => one.blocks?.total,
  admitted: (one) => one.events?.admitted,
  finished: (one) => one.events?.finished,
  preempted: (one) => one.events?.preempted,
  evicted: (one) => one.events?.evicted,
};
const RATES = {
  generated: (one) => one.tokens?.generated,
  prompt: (one) => one.tokens?.prompt,
  recomputed: (one) => one.tokens?.recomputed,
};

function isGap(earlier, sample) {
  return sample.time - earlier.time > (earlier.isPast || sample.isPast ? PAST_GAP_SECONDS : GAP_SECONDS);
}

function hasRestarted(earlier, sample, replica) {
  const before = new Map(replicasOf(earlier, replica).map((one) => [one.index, one.restarts]));
  return replicasOf(sample, replica).some((one) => before.has(one.index) && before.get(one.index) !== one.restarts);
}

// Columns of equal length: `time`, gauges, tokens per second, and requests that failed since the event before. What is
// not known is null. A long pause, or the restart of a replica, is a gap.
export function seriesOf(history, replica) {
  const columns = { time: history.map((one) => one.time), isAfterGap: [], failed: [] };
  for (const name of [...Object.keys(GAUGES), ...Object.keys(RATES), "inUse"]) columns[name] = [];
  history.forEach((sample, position) => {
    const earlier = history[position - 1];
    const replicas = replicasOf(sample, replica);
    columns.isAfterGap.push(earlier === undefined || isGap(earlier, sample) || hasRestarted(earlier, sample, replica));
    columns.failed.push(increase(earlier?.requests?.failed, sample.requests?.failed));
    for (const [name, read] of Object.entries(GAUGES)) columns[name].push(sumOf(replicas, read));
    for (const [name, read] of Object.entries(RATES)) {
      columns[name].push(earlier === undefined ? null : rate(earlier, sample, replica, read));
    }
    columns.inUse.push(columns.used.at(-1) ?? sum([columns.own.at(-1), columns.shared.at(-1)]));
  });
  return columns;
}

// Mean of a column's values of the last seconds, but of the last value at least: one second alone says little.
export function recentMean(series, name, seconds) {
  const since = series.time.at(-1) - seconds + 0.5;
  const last = series.time.length - 1;
  const known = series[name].filter((value, i) => value !== null && (series.time[i] > since || i === last));
  return known.length === 0 ? null : sum(known) / known.length;
}

// Share of the prompt tokens asked for that the cache had, over the history.
export function cachedShare(history, replica) {
  let [cached, computed] = [0, 0];
  for (let position = 1; position < history.length; position++) {
    const before = new Map(replicasOf(history[position - 1], replica).map((one) => [one.index, one]));
    for (const one of replicasOf(history[position], replica)) {
      cached += increase(before.get(one.index)?.tokens?.cached, one.tokens?.cached) ?? 0;
      computed += increase(before.get(one.index)?.tokens?.computed, one.tokens?.computed) ?? 0;
    }
  }
  return cached + computed > 0 ? cached / (cached + computed) : null;
}

// A value of a piecewise linear curve; 0 after its end, null before its beginning.
export function valueAt(curve, seconds) {
  const { seconds: times, blocks } = curve;
  if (times.length === 0 || seconds < times[0]) return null;
  const after = times.findIndex((time) => time >= seconds);
  if (after === -1) return 0;
  if (times[after] === seconds || after === 0) return blocks[after];
  const part = (seconds - times[after - 1]) / (times[after] - times[after - 1]);
  return blocks[after - 1] + part * (blocks[after] - blocks[after - 1]);
}

// The forecast over seconds from the event on: {seconds, blocks, peak, peakSeconds, limit}. Null if nothing runs, or
// if the time of a step is not known yet. The sum of several replicas' forecasts is exact at the ends of all lines.
export function forecastOf(sample, replica) {
  const curves = [];
  let limit = 0;
  for (const one of replicasOf(sample, replica)) {
    const forecast = one.forecast;
    limit += forecast?.limit ?? one.blocks?.total ?? 0;
    if (!forecast || !Number.isFinite(one.step_seconds) || !forecast.steps?.length) continue;
    const age = sample.time - (one.known_at ?? sample.time);
    const seconds = forecast.steps.map((step) => step * one.step_seconds - age);
    curves.push(age > 0 ? afterNow({ seconds, blocks: forecast.blocks }) : { seconds, blocks: forecast.blocks });
  }
  if (curves.length === 0) return null;
  const seconds = [...new Set(curves.flatMap((curve) => curve.seconds))].sort((a, b) => a - b);
  const blocks = seconds.map((time) => sum(curves.map((curve) => valueAt(curve, time))));
  const peak = Math.max(...blocks);
  return { seconds, blocks, peak, peakSeconds: seconds[blocks.indexOf(peak)], limit };
}

function afterNow(curve) {
  const first = curve.seconds.findIndex((time) => time > 0);
  if (first === -1) return { seconds: [0], blocks: [0] };
  return {
    seconds: [0, ...curve.seconds.slice(first)],
    blocks: [valueAt(curve, 0), ...curve.blocks.slice(first)],
  };
}

// The forecast made a minute before the last event, over seconds from the last event on. Null without one.
export function earlierForecast(history, replica) {
  const now = history.at(-1)?.time;
  const close = history.filter((one) => !one.isPast && Math.abs(now - COMPARED_SECONDS - one.time) <= KEPT_SECONDS);
  if (close.length === 0) return null;
  const distance = (one) => Math.abs(now - COMPARED_SECONDS - one.time);
  const sample = close.reduce((best, one) => (distance(one) < distance(best) ? one : best));
  const forecast = forecastOf(sample, replica);
  return forecast && { ...forecast, seconds: forecast.seconds.map((time) => time + sample.time - now) };
}

// Seconds that charts show before and after the last event. `chosen`: the past in seconds, or null for about as much
// past as the forecast reaches, and for all of it while nothing runs. The end of the last forecast is inside; otherwise
// the median of 30 decides, so that the axis does not jump with each event.
export function timeWindow(history, replica, chosen) {
  const recent = history.filter((sample) => !sample.isPast).slice(-30);
  const ends = recent.map((sample) => forecastOf(sample, replica)?.seconds.at(-1) ?? 0);
  const usual = quantile(
    ends.toSorted((a, b) => a - b),
    0.5,
  );
  const horizon = niceSeconds(Math.max(ends.at(-1), usual));
  const reach = usual === 0 && ends.at(-1) === 0 ? history.at(-1).time - history[0].time : horizon;
  const past = chosen ?? Math.min(HISTORY_SECONDS, Math.max(120, niceSeconds(reach)));
  return { past, future: Math.max(horizon, past / 4) };
}

function niceSeconds(seconds) {
  return NICE_SECONDS.find((nice) => nice >= seconds) ?? Math.ceil(seconds / 86400) * 86400;
}

// The replica whose first waiting sequence waits longest: {replica, next}; null if none waits.
export function nextOf(sample, replica) {
  const waiting = replicasOf(sample, replica).filter((one) => one.next);
  if (waiting.length === 0) return null;
  const chosen = waiting.reduce((a, b) => ((b.next.wait_seconds ?? 0) > (a.next.wait_seconds ?? 0) ? b : a));
  return { replica: chosen, next: chosen.next };
}

// Two sentences about the first waiting sequence: [what happens, why].
export function nextSentences(sample, replica) {
  const found = nextOf(sample, replica);
  if (found === null) {
    const replicas = replicasOf(sample, replica);
    const [running, waiting] = [sumOf(replicas, (one) => one.running), sumOf(replicas, (one) => one.waiting)];
    if (waiting > 0) {
      // null: none of them may be admitted yet; absent: the manager has not told
      const isTold = replicas.every((one) => !one.waiting || one.next === null);
      const what = `${count(waiting)} ${waiting === 1 ? "sequence waits" : "sequences wait"}.`;
      return [what, isTold ? "All that wait, wait for grammars." : "What for is not known yet."];
    }
    if (running === null) return ["Not known yet.", ""];
    return running > 0 ? ["Nothing waits.", "All sequences run."] : ["Idle.", "Nothing runs and nothing waits."];
  }
  const { next, replica: at } = found;
  const where = replica === null && replicasOf(sample, null).length > 1 ? ` on replica ${at.index}` : "";
  const size = Number.isFinite(next.blocks)
    ? ` (+${count(next.blocks)} ${next.blocks === 1 ? "block" : "blocks"})`
    : "";
  const facts = [
    Number.isFinite(next.prompt_tokens) ? `${count(next.prompt_tokens)} prompt tokens` : null,
    Number.isFinite(next.wait_seconds) ? `queued for ${duration(next.wait_seconds)}` : null,
  ].filter((fact) => fact !== null);
  return [
    `Next in the queue${where} ${when(next, at)}${size}.`,
    sentence([reason(next, at), facts.join(", ")].filter(Boolean).join("; ")),
  ];
}

function when(next, at) {
  if (next.blocked_by === null || next.blocked_by === undefined) return "starts now";
  if (next.blocked_by === "paused") return "waits until admission resumes";
  if (next.blocked_by === "slots" && !Number.isFinite(next.fits_in_steps)) return "starts when a slot is free";
  if (!Number.isFinite(next.fits_in_steps)) return "does not fit within the forecast";
  const time = Number.isFinite(at.step_seconds) ? `, in ${duration(next.fits_in_steps * at.step_seconds)}` : "";
  return `fits in ${count(next.fits_in_steps)} ${next.fits_in_steps === 1 ? "step" : "steps"}${time}`;
}

function reason(next, at) {
  const reasons = {
    blocks: "it waits for KV blocks",
    slots: Number.isFinite(at.slots) ? `all ${count(at.slots)} slots are taken` : "it waits for a slot",
    paused: "the replica is paused",
  };
  return (
    reasons[next.blocked_by] ??
    (Number.isFinite(next.fits_in_steps) && !next.blocked_by ? "nothing blocks it" : "it waits")
  );
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

// [predicted, actual] completion tokens of sequences that finished within the history, newest last.
export function lengthPairs(history, replica) {
  const pairs = history.flatMap((sample) => replicasOf(sample, replica).flatMap((one) => one.lengths ?? []));
  return pairs.filter(([predicted, actual]) => predicted > 0 && actual > 0).slice(-MAX_PAIRS);
}

// {median, low, high} of actual / predicted: the middle, and the borders of the middle 80 %. Null without pairs.
export function ratioSummary(pairs) {
  if (pairs.length === 0) return null;
  const ratios = pairs.map(([predicted, actual]) => actual / predicted).sort((a, b) => a - b);
  return { median: quantile(ratios, 0.5), low: quantile(ratios, 0.1), high: quantile(ratios, 0.9) };
}

export function quantile(sorted, share) {
  const position = share * (sorted.length - 1);
  const below = Math.floor(position);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (position - below) * (sorted[above] - sorted[below]);
}

// Where the last seconds went: [{name, perStep, ofTime, parts: [{name, share, perStep}]}], in the order of the event.
// perStep: seconds. share: of the group's sum. ofTime: share of the elapsed time of all replicas in which the manager
// worked, or the device or the pipeline stage was busy; null for other groups. Several parts of less than a fiftieth
// become "others".
export function partsOf(history, replica, seconds) {
  const now = history.at(-1)?.time;
  const groups = new Map();
  let [steps, elapsed] = [0, 0];
  for (let position = 1; position < history.length; position++) {
    const sample = history[position];
    if (sample.time <= now - seconds || history[position - 1].isPast) continue;
    for (const one of replicasOf(sample, replica)) {
      if (!one.parts) continue;
      steps += one.steps ?? 0;
      elapsed += sample.time - history[position - 1].time;
      const stages = (one.stages ?? []).map(({ busy, waiting }, number) => [stageName(number), { busy, waiting }]);
      for (const [group, parts] of [...Object.entries(one.parts), ...stages]) {
        const sums = groups.get(group) ?? new Map();
        for (const [name, value] of Object.entries(parts ?? {})) sums.set(name, (sums.get(name) ?? 0) + value);
        groups.set(group, sums);
      }
    }
  }
  const perStep = (value) => (steps > 0 ? value / steps : null);
  return [...groups].map(([name, sums]) => {
    const total = sum([...sums.values()]) ?? 0;
    const spent = name === "manager" ? total : sums.get("busy");
    const all = [...sums];
    const small = all.filter(([, value]) => value < total / 50);
    const parts = all.filter((part) => part[1] > 0 && (small.length < 2 || !small.includes(part)));
    const others = sum(all.filter((part) => !parts.includes(part)).map(([, value]) => value));
    if (others > 0) parts.push(["others", others]);
    return {
      name,
      perStep: perStep(total),
      ofTime: spent === undefined || elapsed === 0 ? null : Math.min(1, spent / elapsed),
      parts: parts.map(([part, value]) => ({ name: part, share: value / total, perStep: perStep(value) })),
    };
  });
}

function stageName(number) {
  return `stage ${number + 1}`;
}

// Microbatches in flight of each pipeline stage, by the name of its group of parts; of several replicas, the sum.
export function microbatchesOf(sample, replica) {
  const counts = {};
  for (const one of replicasOf(sample, replica)) {
    (one.stages ?? []).forEach((stage, number) => {
      const name = stageName(number);
      counts[name] = (counts[name] ?? 0) + (stage.microbatches ?? 0);
    });
  }
  return counts;
}

// The replica that is the last to end; null if one of those with work does not know.
export function etaOf(sample, replica) {
  const busy = replicasOf(sample, replica).filter((one) => (one.running ?? 0) + (one.waiting ?? 0) > 0);
  const known = busy.map((one) => one.eta_seconds);
  if (known.length === 0 || !known.every(Number.isFinite)) return null;
  return busy[known.indexOf(Math.max(...known))];
}

export function oldestWait(sample, replica) {
  const read = (one) => one.oldest_wait_seconds ?? one.next?.wait_seconds;
  const waits = replicasOf(sample, replica).map(read).filter(Number.isFinite);
  return waits.length === 0 ? null : Math.max(...waits);
}

// The oldest requests that run, then the oldest that wait, of all replicas or the chosen one; of each kind, the oldest
// first, and as many as one replica tells.
export function oldestRequests(sample, replica) {
  const all = replicasOf(sample, replica).flatMap((one) => one.oldest ?? []);
  const byAge = (isWaiting) =>
    all
      .filter((one) => (one.state === "waiting") === isWaiting)
      .sort((one, other) => (other.age_seconds ?? 0) - (one.age_seconds ?? 0))
      .slice(0, MAX_OLDEST);
  return [...byAge(false), ...byAge(true)];
}

// Sequences and tokens by API key, and of all others together if there are any.
export function keysOf(sample) {
  const known = (sample.keys ?? []).filter((one) => one !== null && typeof one === "object");
  const isIdle = (one) => !one.running && !one.waiting && !one.tokens?.prompt && !one.tokens?.generated;
  return known.filter((one) => typeof one.name === "string" || !isIdle(one));
}

// Share of a job's lines that have a result; null if nobody knows how many there are.
export function jobShare(job) {
  const { total, done, failed } = job.lines ?? {};
  return Number.isFinite(total) && total > 0 ? Math.min(1, ((done ?? 0) + (failed ?? 0)) / total) : null;
}

// --- words for values; "–" where a figure has no meaning ---

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function count(value) {
  return Number.isFinite(value) ? GROUPED.format(value) : "–";
}

export function compact(value) {
  if (!Number.isFinite(value)) return "–";
  return Math.abs(value) < 10000 ? GROUPED.format(value) : COMPACT.format(value);
}

// For axes without room.
export function shortest(value) {
  return Math.abs(value) < 1000 ? GROUPED.format(value) : COMPACT.format(value);
}

// One digit after the point below 10, else none.
export function speed(value) {
  if (!Number.isFinite(value)) return "–";
  return value > 0 && value < 9.95 ? value.toFixed(1) : compact(value);
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  return share > 0 && share < 0.095 ? `${(100 * share).toFixed(1)} %` : `${Math.round(100 * share)} %`;
}

// Two units below ten of the larger one, else one.
const SURE_RATIO = 1.3;
const RANGE_UNITS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds > 0 && seconds < 0.995) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  if (seconds > 0 && seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  const [large, small, names] = [
    [60, 1, ["min", "s"]],
    [3600, 60, ["h", "min"]],
    [86400, 3600, ["d", "h"]],
  ].findLast(([size]) => whole >= 2 * size);
  const [first, second] = [Math.floor(whole / large), Math.floor((whole % large) / small)];
  return second === 0 || first >= 10 ? `${first} ${names[0]}` : `${first} ${names[0]} ${second} ${names[1]}`;
}

// How long a replica or a job still takes: 3 min 20 s, or 2–4 min while it is not sure.
export function timeLeft(one) {
  const [low, high] = Array.isArray(one?.eta_range) ? one.eta_range : [];
  if (!(high > SURE_RATIO * low)) return duration(one?.eta_seconds);
  const [size, name] = RANGE_UNITS.find(([size]) => high >= 2 * size) ?? RANGE_UNITS.at(-1);
  const ends = [low, high].map((end) => Math.round(end / size));
  return ends[0] === ends[1] ? duration(one.eta_seconds) : `${ends[0]}–${ends[1]} ${name}`;
}

export function milliseconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const value = 1000 * seconds;
  return `${value < 0.0995 ? value.toFixed(2) : value < 9.95 ? value.toFixed(1) : GROUPED.format(value)} ms`;
}

export function price(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? GROUPED.format(value) : value >= 0.995 ? value.toFixed(2) : value.toPrecision(2);
}
