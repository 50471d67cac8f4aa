// SPDX-License-Identifier: Apache-2.0
// A driver for the published parent observer: `node parent.mjs MODULE`.
//
// Commands:  {op:"attach", envelope}   attach with the envelope that the command line tool prints
//            {op:"close"}              what Pi does when its session ends
// Events:    started; attached {members}; ready {ok, value | error}; message {message, options}; stopped {reasons};
//            fault {error}

import { pathToFileURL } from "node:url";
import { emit, serve } from "./lines.mjs";

const { attachParentObserver } = await import(pathToFileURL(process.argv[2]).href);
const pi = { sendMessage: (message, options) => emit("message", { message, options: options ?? {} }) };
const session = { closed: false };
let observer;

function close() {
  session.closed = true;
  return observer?.stop?.();
}

async function attach(envelope) {
  try {
    observer = await attachParentObserver(pi, envelope, session, (...reasons) => emit("stopped", { reasons }));
    emit("attached", { members: Object.keys(observer ?? {}) });
    emit("ready", { ok: true, value: (await observer?.ready) ?? null });
  } catch (error) {
    emit("ready", { ok: false, error: String(error?.message ?? error) });
  }
}

await serve(({ op, envelope }) => {
  if (op === "close") return close();
  emit("started");
  void attach(envelope);
}, close);
