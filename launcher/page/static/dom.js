// Makes elements and formats numbers. Texts always become text nodes, so that a model's output is never parsed as markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// Turns `code` in our own texts into elements.
export function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

const MOST_MARKS = 2000;
const PLAIN = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const WHOLE = new Intl.NumberFormat("en");

export function number(value, places = null) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (places !== null) return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  if (Number.isInteger(value)) return WHOLE.format(value);
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e7 ? value.toExponential(2) : PLAIN.format(value);
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

// Seconds as text, exact to a step given in seconds: `30 s`, `5 min`, `1:30 min`, `2:05 h`, `3 d`.
export function clock(seconds, step = 1) {
  const s = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (s === 0) return "0";
  if (step % 86400 === 0) return `${s / 86400} d`;
  if (s >= 3600) return step < 60 ? `${Math.floor(s / 3600)}:${two(Math.floor((s % 3600) / 60))}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor((s % 3600) / 60))} h`;
  if (s < 60) return `${s} s`;
  return step % 60 === 0 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 60)}:${two(s % 60)} min`;
}

// A time span as text, in minutes once it is that long.
export function duration(seconds) {
  return clock(seconds, seconds < 90 ? 1 : 60);
}

// A text in which the words that were searched for are marked; case is ignored.
export function marked(text, words) {
  const low = text.toLowerCase();
  const wanted = low.length === text.length ? words.map((word) => word.toLowerCase()).filter(Boolean) : [];
  const parts = [];
  let from = 0;
  while (parts.length < MOST_MARKS) {
    const places = wanted.map((word) => [low.indexOf(word, from), word.length]).filter(([at]) => at >= 0);
    if (places.length === 0) break;
    const [at, length] = places.reduce((first, other) => (other[0] < first[0] ? other : first));
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + length)));
    from = at + length;
  }
  return [...parts, text.slice(from)];
}

// How many decimal places a value has, below 0 for zeros before the point: 1 of 0.5, 0 of 25, -3 of 5000.
export function decimals(value) {
  for (let places = -15; places < 15; places += 1) {
    const whole = value * 10 ** places;
    if (Math.round(whole) >= 1 && Math.abs(whole - Math.round(whole)) < 1e-6) return places;
  }
  return 15;
}

export function withUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return share(value);
  if (["s", "ms", "MB", "GB", "W", "tokens/s", "nats/token"].includes(unit)) return `${number(value)} ${unit}`;
  return number(value);
}
