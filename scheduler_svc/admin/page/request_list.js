// The requests by where they are: a tab for each place, a row for each request.

import { number } from "./wire.js";
import { byId, element, linkButton, setText, syncChildren } from "./dom.js";
import { count, counted, spanMs } from "./format.js";

const MOST_ROWS = 200;

const TABS = [
  { id: "waiting", name: "Waiting", time: "Waits", empty: "No waiting requests." },
  { id: "running", name: "Running", time: "Age", empty: "No running requests.", status: "REQUEST_STATUS_RUNNING" },
  { id: "swapped", name: "Swapped", time: "Age", empty: "No swapped requests.", status: "REQUEST_STATUS_SWAPPED" },
  { id: "preempted", name: "Preempted", time: "Age", empty: "No preempted requests with tokens in flight.", status: "REQUEST_STATUS_PREEMPTED" },
  { id: "parked", name: "Quarantined", time: "Age", empty: "No quarantined requests.", status: "REQUEST_STATUS_PARKED" },
  { id: "ended", name: "Ended", time: "Ended", empty: "No ended requests yet." },
];

export class RequestList {
  // `openRequest(id)` is called for a row that is chosen.
  constructor(openRequest) {
    this.openRequest = openRequest;
    this.selectedId = null;
    this.data = null;
    this.buttons = new Map(TABS.map((tab) => [tab.id, this.createTab(tab)]));
    byId("tabs").append(...this.buttons.values());
    byId("tabs").addEventListener("keydown", (event) => this.onTabKey(event));
    this.isTabChosen = false;
    this.openTab(TABS[0]);
  }

  // Show the responses of GetSchedulerState, ListQueue, ListRequests and ListEndedRequests.
  show(data) {
    this.data = data;
    const { state, ended } = data;
    const parked = number(state.numParkedRequests);
    const counts = {
      waiting: number(state.numWaitingRequests) - parked, running: number(state.numRunningRequests),
      swapped: number(state.numSwappedRequests), preempted: number(state.numPreemptedRequests), parked,
      ended: number(state.numFinishedRequests) + number(state.numFailedRequests),
    };
    for (const [id, button] of this.buttons) setText(button.lastElementChild, count(counts[id]));
    this.openFirstTabWithRows(counts);
    this.showRows(ended);
  }

  // Until somebody chooses a tab: open the first one that has requests.
  openFirstTabWithRows(counts) {
    const first = TABS.find((tab) => counts[tab.id]);
    if (this.isTabChosen || !first) return;
    this.isTabChosen = true;
    if (first !== this.tab) this.openTab(first);
  }

  // Whether a request is among those that were shown last.
  has(requestId) {
    const { queue = [], live = [], ended = [] } = this.data ?? {};
    return [...queue, ...live, ...ended].some((request) => request.requestId === requestId);
  }

  select(requestId) {
    this.selectedId = requestId;
    if (this.data) this.showRows();
  }

  showRows() {
    const all = this.rowsOf(this.tab);
    const rows = all.slice(0, MOST_ROWS);
    syncChildren(byId("rows"), rows, (row) => row.id, (row) => this.createRow(row), (node, row) => this.updateRow(node, row));
    byId("request-table").hidden = rows.length === 0;
    const more = Number(this.buttons.get(this.tab.id).lastElementChild.textContent.replaceAll(",", "")) - rows.length;
    setText(byId("rows-empty"), rows.length ? (more > 0 ? `and ${counted(more, "other")}` : "") : this.tab.empty);
  }

  // { id, prompt, output, time, about, isBad } of each request of a tab.
  rowsOf(tab) {
    const { queue, live, ended } = this.data;
    if (tab.id === "waiting") return queue.map(waitingRow);
    if (tab.id === "ended") return ended.map(endedRow);
    return live.filter((request) => request.status === tab.status).map(liveRow);
  }

  createTab(tab) {
    const button = element("button", { type: "button", role: "tab", id: `tab-${tab.id}`, "aria-controls": "tab-panel" },
      `${tab.name} `, element("span", { className: "badge" }, "0"));
    button.addEventListener("click", () => {
      this.isTabChosen = true;
      this.openTab(tab);
    });
    return button;
  }

  openTab(tab) {
    this.tab = tab;
    for (const [id, button] of this.buttons) {
      const isOpen = id === tab.id;
      button.setAttribute("aria-selected", isOpen);
      button.tabIndex = isOpen ? 0 : -1;
    }
    byId("tab-panel").setAttribute("aria-labelledby", `tab-${tab.id}`);
    setText(byId("time-column"), tab.time);
    byId("request-table").classList.toggle("without-output", tab.id === "waiting");
    byId("tab-panel").scrollTop = 0;
    if (this.data) this.showRows();
  }

  onTabKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tab = TABS[(TABS.indexOf(this.tab) + step + TABS.length) % TABS.length];
    this.isTabChosen = true;
    this.openTab(tab);
    this.buttons.get(tab.id).focus();
    event.preventDefault();
  }

  createRow(row) {
    const name = linkButton(row.id, () => this.openRequest(row.id));
    const cells = [element("td", {}, name, element("p", { className: "about" })), element("td"), element("td"), element("td")];
    const node = element("tr", {}, ...cells);
    node.addEventListener("click", (event) => {
      if (event.target !== name) this.openRequest(row.id);
    });
    return node;
  }

  updateRow(node, row) {
    const [first, ...numbers] = node.children;
    setText(first.lastElementChild, row.about);
    first.lastElementChild.classList.toggle("trouble", row.isBad);
    [row.prompt, row.output, row.time].forEach((text, i) => setText(numbers[i], text));
    node.classList.toggle("chosen", row.id === this.selectedId);
    if (row.id === this.selectedId) first.firstElementChild.setAttribute("aria-current", "true");
    else first.firstElementChild.removeAttribute("aria-current");
  }
}

function waitingRow(request) {
  const again = request.hasRun ? "resumes; " : "";
  return {
    id: request.requestId, prompt: count(number(request.numPromptTokens)), output: "", isBad: false,
    time: spanMs(number(request.ageMs)), about: `${ownerText(request)}${again}${request.reason ?? ""}`,
  };
}

function liveRow(request) {
  const preemptions = number(request.numPreemptions), losses = number(request.numLosses);
  const parts = [
    request.executor ? `on ${request.executor}` : "",
    preemptions ? `preempted ${counted(preemptions, "time")}` : "",
    losses ? `executor lost ${counted(losses, "time")}` : "",
  ];
  return { ...counts(request), time: spanMs(number(request.ageMs)), isBad: false, about: ownerText(request) + parts.filter(Boolean).join("; ") };
}

function endedRow(request) {
  return {
    ...counts(request), isBad: request.statusText === "failed", time: `${spanMs(number(request.endedAgoMs))} ago`,
    about: `${ownerText(request)}${request.outcome ?? ""} after ${spanMs(number(request.ageMs))}`,
  };
}

function counts(request) {
  return { id: request.requestId, prompt: count(number(request.numPromptTokens)), output: count(number(request.numOutputTokens)) };
}

function ownerText(request) {
  const priority = number(request.priority);
  return `${request.tenant ? `${request.tenant} · ` : ""}${priority ? `priority ${priority} · ` : ""}`;
}
