// Reads the events of /live with fetch, since EventSource cannot send a key. Reconnects until it is stopped.

export const STALE_SECONDS = 5;
const FIRST_DELAY = 1;
const LONGEST_DELAY = 30;
const GONE_AFTER_SECONDS = 20;

// Takes the text of an event stream in any parts; calls onData with the data of each event.
export function eventReader(onData) {
  let rest = "";
  let data = [];
  return (text) => {
    rest += text;
    // a \r at the end may be half of a line's end
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length > 0) onData(data.join("\n"));
        data = [];
      } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  };
}

// Seconds until the next try after `failures` ones, before the random part.
export function retryDelay(failures) {
  return Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** Math.max(0, failures - 1));
}

async function message(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

export class LiveStream {
  #stop = null; // ends the present connection or wait
  #isWanted = false;
  #failures = 0;
  #failedSince = null;
  #retry = null;

  // readKey() gives the key or null. onData takes an event's text. onState takes (state, detail): connecting, live,
  // reconnecting and gone (detail: {until, why}), key (it is missing or wrong), refused (detail: {why}).
  constructor(path, readKey, onData, onState) {
    Object.assign(this, { path, readKey, onData, onState });
  }

  start() {
    this.stop();
    this.#isWanted = true;
    this.#failures = 0;
    this.#failedSince = null;
    this.#connect();
  }

  stop() {
    this.#isWanted = false;
    clearTimeout(this.#retry);
    this.#retry = null;
    this.#stop?.abort();
    this.#stop = null;
  }

  // Tries now if it waits for the next try.
  hurry() {
    if (this.#isWanted && this.#retry !== null) {
      clearTimeout(this.#retry);
      this.#connect();
    }
  }

  // Ends a connection that sends nothing; the next one is made as after any other failure.
  renew() {
    if (this.#isWanted && this.#retry === null) this.#stop?.abort();
  }

  async #connect() {
    const stop = new AbortController();
    this.#stop = stop;
    this.#retry = null;
    if (this.#failures === 0) this.onState("connecting");
    const key = this.readKey();
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    let why = "the connection ended";
    let isOpen = false;
    try {
      const answer = await fetch(this.path, { headers, cache: "no-store", signal: stop.signal });
      if (answer.status === 401) return this.#end(stop, "key", { wasGiven: key !== null });
      if (answer.status >= 400 && answer.status < 500 && answer.status !== 429) {
        return this.#end(stop, "refused", { why: await message(answer) });
      }
      if (!answer.ok) throw new Error(await message(answer));
      isOpen = true;
      await this.#read(answer.body.getReader(), stop);
    } catch (error) {
      // browsers do not tell why
      if (error.name === "AbortError") why = "nothing came any more";
      else if (error.name !== "TypeError") why = error.message;
      else why = isOpen ? "the connection was lost" : "cannot connect";
    }
    if (this.#stop === stop && this.#isWanted) this.#wait(why);
  }

  async #read(reader, stop) {
    const decoder = new TextDecoder();
    const push = eventReader((data) => {
      if (this.#stop !== stop) return;
      this.#failures = 0;
      this.#failedSince = null;
      this.onState("live");
      this.onData(data);
    });
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      push(decoder.decode(value, { stream: true }));
    }
  }

  #end(stop, state, detail) {
    if (this.#stop !== stop) return;
    this.#isWanted = false;
    this.onState(state, detail);
  }

  #wait(why) {
    this.#failures += 1;
    this.#failedSince ??= Date.now();
    const isGone = Date.now() - this.#failedSince > 1000 * GONE_AFTER_SECONDS;
    const delay = 1000 * retryDelay(this.#failures) * (0.8 + 0.4 * Math.random());
    this.#retry = setTimeout(() => this.#connect(), delay);
    this.onState(isGone ? "gone" : "reconnecting", { until: Date.now() + delay, why });
  }
}
