// Gets the data from the server, or from the file in which the page was saved.

const block = document.getElementById("data");
const saved = block ? JSON.parse(block.textContent) : null;

// The panel about all runs of a saved comparison.
export const comparison = saved?.comparison ?? null;
export const isSaved = saved !== null;

export async function getJson(path, parameters = {}) {
  if (saved) return ANSWERS[path](saved.episodes[parameters.run] ?? [], parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  const response = await fetch(`${path}?${query}`);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// Calls onStatus with the statuses of the runs: at once, after each change, and after each reconnection.
export function listen(onStatus, onConnection) {
  if (saved) {
    onConnection("saved", saved.made);
    onStatus({ server: "", runs: saved.runs });
    return;
  }
  let source = null;
  let timer = null;
  const open = () => {
    source = new EventSource("api/events");
    source.onopen = () => onConnection("live");
    source.onmessage = (event) => {
      onConnection("live");
      onStatus(JSON.parse(event.data));
    };
    source.onerror = () => {
      onConnection("lost");
      // After some errors, such as those of a proxy or of a starting server, the browser does not reconnect itself.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(timer);
        timer = setTimeout(open, 1500);
      }
    };
  };
  open();
  addEventListener("pagehide", () => source.close());
}

// Answers the server's requests (launcher/folder/query.py) from the data in the file.
const ANSWERS = {
  "api/panels": (_, { run }) => saved.panels[run],
  "api/words": (rows) => ({ reasons: words(rows, "reason"), generators: words(rows, "generator") }),
  "api/episode": (rows, { file, offset }) => {
    const row = rows.find((one) => one.file === file && one.offset === offset);
    if (!row) throw new Error("this episode is not in the file");
    return row.episode;
  },
  "api/episodes": (rows, query) => {
    const fitting = rows.filter(test(rows, query));
    const key = query.sort.replace("-", "");
    const sign = query.sort.startsWith("-") ? -1 : 1;
    const of = (row) => row[key === "prompt" ? "prompt_id" : key];
    fitting.sort((a, b) => (of(a) === null || of(b) === null ? (of(a) === null) - (of(b) === null) : sign * (of(a) > of(b) ? 1 : of(a) < of(b) ? -1 : 0)));
    const end = query.start + query.count;
    return { rows: fitting.slice(query.start, end), total: fitting.length, next: end < fitting.length ? end : null };
  },
};
const FLAGS_OF = { eval: ["eval"], skipped: ["skipped"], "tool error": ["tool error"], failed: ["skipped", "tool error"], cut: ["cut"], "with tokens": ["tokens"] };
const COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b, "==": (a, b) => a === b, "!=": (a, b) => a !== b };

function words(rows, name) {
  return [...new Set(rows.map((row) => row[name]))].filter(Boolean).slice(0, 200);
}

function test(rows, query) {
  const low = (text) => String(text ?? "").toLowerCase();
  const isId = rows.some((row) => row.prompt_id === query.prompt);
  const isReason = rows.some((row) => low(row.reason) === low(query.reason));
  const version = versions(query.version);
  const rewards = comparisons(query.reward);
  return (row) =>
    (!query.kind || (query.kind === "train" ? !row.flags.includes("eval") : FLAGS_OF[query.kind].some((flag) => row.flags.includes(flag)))) &&
    (!query.reward || (row.reward !== null && rewards.every(([compare, bound]) => compare(row.reward, bound)))) &&
    (!query.reason || (isReason ? low(row.reason) === low(query.reason) : low(row.reason).includes(low(query.reason)))) &&
    (!query.generator || row.generator === query.generator) &&
    (!version || (row.versions[0] <= version[1] && version[0] <= row.versions[1])) &&
    (!query.prompt || (isId ? row.prompt_id === query.prompt : low(row.prompt).includes(low(query.prompt)))) &&
    (!query.text || low(JSON.stringify(row)).includes(low(JSON.stringify(query.text).slice(1, -1))));
}

function comparisons(text) {
  return (text ? text.split(",") : []).map((part) => {
    const match = /^\s*(<=|>=|==|=|!=|<|>)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*$/i.exec(part);
    if (!match) throw new Error(`reward '${text}' is not a comparison; write for example '<0.5', '>=1' or 0 (in quotes)`);
    return [COMPARE[match[1] ?? "="], Number(match[2])];
  });
}

function versions(text) {
  const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(text);
  if (text && !match) throw new Error(`version '${text}' is neither a version nor a range; write for example 20 or 10-30`);
  return match && [Number(match[1]), Number(match[2] ?? match[1])];
}
