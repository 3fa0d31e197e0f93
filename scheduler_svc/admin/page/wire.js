// Calls of AdminService on this page's own origin: unary JSON of the Connect protocol.
// In its JSON, fields that are zero are absent, 64-bit numbers are strings, bytes are base64.

const SERVICE = "/octavo.admin.v1.AdminService/";
const TOKEN_KEY = "octavo-token";
const TIMEOUT_MS = 10_000;

// Nobody answered: the scheduler is gone, or the network is.
export class UnreachableError extends Error {}

// The scheduler answered with an error; `code` is the Connect protocol's name of it, such as "not_found".
export class CallError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

// Call a method; return its response as an object.
// Throws: CallError, UnreachableError.
export async function call(method, request = {}) {
  const headers = { "Content-Type": "application/json", "Connect-Protocol-Version": "1" };
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token && !/^[!-~]+$/.test(token)) {
    throw new CallError("unauthenticated", "a token has visible ASCII characters only");
  }
  if (token) headers.Authorization = `Bearer ${token}`;
  let response, text;
  try {
    response = await fetch(SERVICE + method, {
      method: "POST", headers, body: JSON.stringify(request), cache: "no-store", credentials: "same-origin",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    text = await response.text();
  } catch (error) {
    throw new UnreachableError(error.message);
  }
  const answer = parsed(text);
  if (response.ok && answer) return answer;
  throw new CallError(answer?.code ?? `HTTP ${response.status}`, answer?.message ?? "the answer is not JSON");
}

// Keep the token that every call sends, until the tab is closed.
export function setToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

export function hasToken() {
  return Boolean(sessionStorage.getItem(TOKEN_KEY));
}

// A number that may be absent, or a string since it has 64 bits.
export function number(value) {
  return value === undefined ? 0 : Number(value);
}

// Bytes of a base64 string that may be absent.
export function bytes(base64) {
  const characters = atob(base64 ?? "");
  const decoded = new Uint8Array(characters.length);
  for (let i = 0; i < decoded.length; i++) decoded[i] = characters.charCodeAt(i);
  return decoded;
}

// "REQUEST_STATUS_WAITING" -> "waiting", given "REQUEST_STATUS_".
export function enumName(value, prefix) {
  return (value ?? "").replace(prefix, "").replaceAll("_", " ").toLowerCase();
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
