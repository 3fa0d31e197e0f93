// One block: its state, and who has it.

import { number, enumName } from "./wire.js";
import { byId, linkButton, element, setText, syncChildren } from "./dom.js";
import { count, counted, sentence } from "./format.js";

const MOST_IN_TIP = 3; // requests in a tip

// What a GetBlockResponse says beside the state, for a tip.
export function blockTip(response) {
  const ids = [...new Set((response.holders ?? []).map((holder) => holder.requestId))];
  const names = ids.slice(0, MOST_IN_TIP).join(", ");
  const more = ids.length > MOST_IN_TIP ? ` and ${counted(ids.length - MOST_IN_TIP, "other")}` : "";
  return [poolText(response), referencesText(response), cacheText(response), names && `used by ${names}${more}`].filter(Boolean).join("; ");
}

function poolText(response) {
  return response.isOfEncoder ? "output of the encoder" : "";
}

function referencesText(response) {
  const references = number(response.numReferences);
  return references ? `referenced by ${counted(references, "block table")}` : "";
}

function cacheText(response) {
  return response.isRegistered ? "in the prefix cache" : "";
}

// Show a block: a response, or a problem in a sentence.
export function showBlockPanel(address, block, { response, problem }, openRequest) {
  byId("block").hidden = false;
  setText(byId("block-title"), `Block ${count(block)} of ${address}`);
  setText(byId("block-text"), problem ?? blockSentence(response));
  const holders = response?.holders ?? [];
  syncChildren(byId("block-holders"), holders, (holder) => `${holder.requestId} ${holder.outputIndex}`,
    (holder) => element("li", {}, linkButton(holder.requestId, () => openRequest(holder.requestId)), element("span", { className: "quiet" })),
    (item, holder) => setText(item.lastElementChild, `output ${count(number(holder.outputIndex))}, its block ${count(number(holder.logicalBlock))}`));
}

function blockSentence(response) {
  const state = enumName(response.state, "BLOCK_STATE_");
  return sentence([state, poolText(response), referencesText(response), cacheText(response)].filter(Boolean).join(", "));
}

export function hideBlockPanel() {
  byId("block").hidden = true;
}
