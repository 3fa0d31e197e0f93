// Whatever comes from the server is shown by textContent and append(), which make text of it, never markup; answers
// are Markdown, of which DOMPurify lets the tags below through.
const TOKEN = "octavo-token"; // in the sessionStorage of this tab
const HISTORY = "octavo-conversation"; // in the localStorage, for all tabs and later visits
const RETRY_MS = 2000;
const SANE = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const byId = (id) => document.getElementById(id);
const escaped = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
const lined = (text) => escaped(text.trim()).replaceAll("\n", "<br>");

// HTML of the model is shown, not obeyed; a picture is a link, since whoever shows it tells its server so.
marked.use({
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${lined(text)}</p>` : /^<br *\/?>$/i.test(text) ? "<br>" : lined(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

let turns = []; // a question, its answer, and so on: role, content, model, and the element that shows them
let running = null; // the AbortController of the answer that is being written
let edited = null; // the question that the next one replaces, with all that follows

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

class Broken extends Error {}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  let message = `The server answered with status ${response.status}.`;
  try { message = JSON.parse(text).error.message; } catch { /* not in the API's shape */ }
  throw new Refused(response.status, message);
}

function say(text, isBad = false) {
  byId("status").textContent = text;
  byId("status").className = isBad ? "bad" : "";
}

function sayError(error) {
  const isFirst = error.status === 401 && !sessionStorage.getItem(TOKEN);
  const isSaid = error instanceof Refused || error instanceof Broken;
  say(isFirst ? "This server asks for a token." : isSaid ? error.message : "The server does not respond.", true);
  if (error.status === 401 || error.status === 403) {
    byId("token-form").hidden = false;
    byId("token").focus();
  }
}

async function loadModels() {
  try {
    const { data } = await (await call("/v1/models")).json();
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    byId("token-form").hidden = true;
    say("");
    byId("question").focus();
  } catch (error) {
    sayError(error);
    if (error.status !== 401 && error.status !== 403) setTimeout(loadModels, RETRY_MS);
  }
}

function button(label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = label;
  made.addEventListener("click", act);
  return made;
}

// Browsers have no clipboard for a page that comes by HTTP from another machine.
function copy(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  focused.focus();
  say(isDone ? "Copied." : "The browser did not copy it.", !isDone);
}

function turnOf({ role, content, model }) {
  const element = document.createElement("article");
  const turn = { role, content, model, element };
  element.className = role;
  const title = document.createElement("h2");
  title.textContent = role === "user" ? "You" : model;
  const act = role === "user" ? button("Edit", () => edit(turn)) : button("Copy", () => copy(turn.content));
  const text = document.createElement("div");
  text.className = "text";
  element.append(act, title, text);
  write(turn);
  return turn;
}

// Returns how long it took, in milliseconds.
function write({ role, content, element }) {
  const start = performance.now();
  const text = element.querySelector(".text:not(details *)");
  text.textContent = content;
  if (role === "user") return 0;
  let markup = null;
  try { markup = DOMPurify.sanitize(marked.parse(content), SANE); } catch { /* nested too deeply: it stays text */ }
  text.classList.toggle("markdown", markup !== null);
  if (markup === null) return 0;
  text.replaceChildren(markup);
  for (const link of text.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const block of text.querySelectorAll("pre")) {
    const frame = document.createElement("div");
    frame.className = "code";
    block.replaceWith(frame);
    frame.append(block, button("Copy", () => copy(block.textContent.replace(/\n$/, ""))));
  }
  return performance.now() - start;
}

function showReasoning(element, piece) {
  let folded = element.querySelector(".reasoning");
  if (folded === null) {
    folded = document.createElement("details");
    folded.className = "reasoning";
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    const text = document.createElement("div");
    text.className = "text";
    folded.append(summary, text);
    element.querySelector("h2").after(folded);
  }
  folded.querySelector(".text").append(piece);
}

function settle() {
  byId("conversation").replaceChildren(...turns.map(({ element }) => element));
  byId("stop").hidden = running === null;
  byId("send").disabled = running !== null;
  byId("regenerate").disabled = running !== null || turns.length === 0;
  byId("clear").disabled = turns.length === 0;
  keep();
}

function keep() {
  const kept = turns.at(-1)?.content === "" && running !== null ? turns.slice(0, -2) : turns;
  try {
    if (kept.length === 0) localStorage.removeItem(HISTORY);
    else localStorage.setItem(HISTORY, JSON.stringify(kept.map(({ role, content, model }) => ({ role, content, model }))));
  } catch { /* full, or forbidden: this tab has the conversation */ }
}

function recall() {
  try { turns = JSON.parse(localStorage.getItem(HISTORY) ?? "[]").map(turnOf); } catch { /* none */ }
  settle();
}

function body(asked) {
  const system = byId("system").value;
  const messages = asked.map(({ role, content }) => ({ role, content }));
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value)); // undefined is left out
  return JSON.stringify({
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true },
  });
}

async function* lines(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}

// Writes the answer to the turns so far; returns what there is to say of its end.
async function read(response, turn) {
  let end = "";
  let usage = null;
  let timer = null; // of the next time that the Markdown is drawn: the longer that takes, the more seldom
  let pause_ms = 16;
  for await (const line of lines(response)) {
    if (line.startsWith(": ")) say(line.slice(2)); // why the request waits
    if (!line.startsWith("data: ")) continue;
    const data = line.slice(6);
    if (data === "[DONE]") return `${usage?.completion_tokens ?? 0} tokens${end}`;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Broken(chunk.error.message);
    usage = chunk.usage ?? usage;
    for (const { delta, finish_reason } of chunk.choices) {
      if (delta.reasoning_content) showReasoning(turn.element, delta.reasoning_content);
      if (delta.content) {
        turn.content += delta.content;
        timer ??= setTimeout(() => {
          timer = null;
          pause_ms = Math.max(16, 4 * write(turn));
          follow();
        }, pause_ms);
      }
      if (finish_reason === "length") end = "; the answer reached its limit";
    }
    follow();
  }
  throw new Broken("The answer broke off.");
}

function follow() {
  const page = document.scrollingElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 120) page.scrollTop = page.scrollHeight;
}

// Asks the questions so far. Without an answer, the conversation is as `before`, and the question in the box again.
async function answer(asked, before = turns, question = "") {
  const mine = (running = new AbortController());
  const options = { method: "POST", body: body(asked), signal: mine.signal };
  const turn = turnOf({ role: "assistant", content: "", model: byId("model").value });
  turns = [...asked, turn];
  edited = null;
  settle();
  turn.element.scrollIntoView({ block: "nearest" });
  say("");
  let end = null;
  try {
    end = await read(await call("/v1/chat/completions", options), turn);
    say(end);
  } catch (error) {
    if (!turns.includes(turn)) return; // cleared
    if (mine.signal.aborted) say("Stopped.");
    else sayError(error);
  } finally {
    if (running === mine) running = null;
    if (turns.includes(turn) && end === null && !turn.content) {
      turns = before;
      byId("question").value = [question, byId("question").value].filter(Boolean).join("\n");
    }
    write(turn);
    settle();
  }
}

function edit(turn) {
  if (running !== null) return;
  edited = turn;
  byId("question").value = turn.content;
  byId("question").focus();
  say("Send asks this in place of the old question and of all below it. Escape leaves it as it was.");
}

function leave() {
  if (running === null && edited === null) return;
  running?.abort();
  if (edited !== null) {
    edited = null;
    byId("question").value = "";
    say("");
  }
  byId("question").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("question").focus();
  const content = byId("question").value;
  if (running !== null || !content.trim()) return;
  byId("question").value = "";
  const kept = edited === null ? turns : turns.slice(0, turns.indexOf(edited));
  answer([...kept, turnOf({ role: "user", content })], turns, content);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) leave();
});
byId("stop").addEventListener("click", leave);
byId("regenerate").addEventListener("click", () => {
  answer(turns.slice(0, -1));
  byId("question").focus();
});
byId("clear").addEventListener("click", () => {
  running?.abort();
  running = edited = null;
  turns = [];
  say("");
  settle();
  byId("question").focus();
});
addEventListener("pagehide", keep); // with what there is of an answer
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value.trim());
  byId("token").value = "";
  loadModels();
});

recall();
loadModels();
