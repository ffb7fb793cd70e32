// Replays a recording: JSON Lines, one event of /live each.

import { HISTORY_SECONDS, completed, isSample } from "./samples.mjs";

export const MAX_BYTES = 256 * 1024 * 1024;
const LONGEST_PAUSE = 3; // seconds; where a recording has none for longer, the replay skips them

// The events of a recording's text in order. Lines that are not whole are left out, such as the last one of a server
// that was killed. Raises an error that names the first other line that is no event.
export function parseRecording(text) {
  const samples = [];
  text.split("\n").forEach((line, position) => {
    let value = null;
    try {
      value = JSON.parse(line);
    } catch {
      return;
    }
    if (!isSample(value)) throw new Error(`line ${position + 1} is not an event of /live that this page knows`);
    samples.push(completed(value.time > samples.at(-1)?.time ? samples.at(-1) : undefined, value));
  });
  if (samples.length === 0) throw new Error("it has no events of /live");
  return samples;
}

// Seconds of playing at which each event is shown: the time since the first, without long pauses.
export function playTimes(samples) {
  const times = [0];
  for (let position = 1; position < samples.length; position++) {
    const gone = samples[position].time - samples[position - 1].time;
    times.push(times[position - 1] + Math.min(LONGEST_PAUSE, Math.max(0, gone)));
  }
  return times;
}

// The position of the last event that is shown at `seconds`.
export function positionAt(times, seconds) {
  let [low, high] = [0, times.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (times[middle] <= seconds) low = middle;
    else high = middle - 1;
  }
  return low;
}

// What the page would remember at this event, had it listened all the time.
export function historyAt(samples, position) {
  let first = position;
  while (
    first > 0 &&
    samples[first - 1].time < samples[first].time &&
    samples[first - 1].time >= samples[position].time - HISTORY_SECONDS
  ) {
    first -= 1;
  }
  return samples.slice(first, position + 1);
}

export class Player {
  #timer = null;
  #last = 0;

  // onMove(player) is called when another event is to be shown, or playing starts or ends.
  constructor(samples, onMove) {
    this.samples = samples;
    this.times = playTimes(samples);
    this.seconds = 0;
    this.speed = 1;
    this.onMove = onMove;
  }

  get length() {
    return this.times.at(-1);
  }

  get position() {
    return positionAt(this.times, this.seconds);
  }

  get isPlaying() {
    return this.#timer !== null;
  }

  play() {
    if (this.isPlaying) return;
    if (this.seconds >= this.length) this.seconds = 0;
    this.#last = performance.now();
    this.#timer = setInterval(() => this.#advance(), 100);
    this.onMove(this);
  }

  pause() {
    clearInterval(this.#timer);
    this.#timer = null;
    this.onMove(this);
  }

  seek(seconds) {
    this.seconds = Math.min(this.length, Math.max(0, seconds));
    this.onMove(this);
  }

  #advance() {
    const now = performance.now();
    const before = this.position;
    this.seconds = Math.min(this.length, this.seconds + (this.speed * (now - this.#last)) / 1000);
    this.#last = now;
    if (this.seconds >= this.length) this.pause();
    else if (this.position !== before) this.onMove(this);
  }
}
