// SPDX-License-Identifier: Apache-2.0
// A scripted stand-in for Pi that hosts the published worker bridge: `node host.mjs MODULE`, one process per role, with
// the bridge's variables in its environment.
//
// Commands, a line each:
//   {op:"start", rules?, entries?, tools?, context_usage?, on_abort?}   load the bridge and begin the session
//   {op:"set", rules?, context_usage?, on_abort?}   change what holds from here on
//   {op:"turn", rule?, details?}                    let the agent take a turn of its own accord, by default on its newest
//                                                   assignment with a report
//   {op:"continue"}                                 let a held turn go on
//   {op:"shutdown"}                                 end the session, not the process
//
// A message that triggers a turn is matched against the rules; the first one that fits says what the agent does:
//   kind, round     what it fits: the assignment's kind, or a context's (`operator_message`); absent fits all
//   times           how often it applies (absent: always)
//   do              "report" (for assignments the default), "settle": end the turn without a report (for contexts the
//                   default), "ignore": no turn at all
//   hold            true: the turn has begun and waits for "continue" or for an abort
//   tools           calls [{name, input?, result?}] made before the report; the bridge may refuse or shorten them
//   report          the report's members, over those of the kind's default; `raw` replaces them altogether
//   attempts        how often a refused report is tried (1); the next try waits for the bridge to have reconnected
//   usage           members of the turn's provider usage, over the default
// on_abort: "settle" (default) ends the turn that is running, "ignore" does not.
//
// Events: registered {tool}; started; message {message, options}; entry {entry}; active_tools {tools}; turn {kind, round,
// details}; held; projection {before, after, roles}: what the model would be sent, in characters; tool_call {name, input,
// blocked, reason}; tool_result {name, ok, result | error}; abort; ignored {details}; settled; fault {error}

import { pathToFileURL } from "node:url";
import { emit, serve } from "./lines.mjs";
import { reportFor } from "./reports.mjs";

const handlers = new Map();
const tools = new Map();
const state = { rules: [], entries: [], active: [], on_abort: "settle", context_usage: undefined };
const queue = [];
let running = false;
let shut = false;
let calls = 0;
let release = () => {};
let aborted = false;
let newest = {};
const followUps = [];

// --- the session ---------------------------------------------------------------------------------------------------

function record(entry) {
  state.entries.push(entry);
  emit("entry", { entry });
}

const pi = {
  registerTool(tool) {
    tools.set(tool.name, tool);
    emit("registered", { tool: { name: tool.name, parameters: tool.parameters } });
  },
  on(name, handler) {
    handlers.set(name, [...(handlers.get(name) ?? []), handler]);
  },
  sendMessage(message, options = {}) {
    emit("message", { message, options });
    // What comes in during a turn is a follow-up: the session has it when the turn is over.
    const entry = { type: "custom_message", ...message };
    if (running) followUps.push(entry);
    else record(entry);
    if (message.details?.kind === "assignment") newest = message.details;
    if (options.triggerTurn) enqueue(message.details ?? {});
  },
  appendEntry(customType, data) {
    record({ type: "custom", customType, data });
  },
  getActiveTools: () => [...state.active],
  setActiveTools(names) {
    state.active = [...names];
    emit("active_tools", { tools: names });
  },
};

const ctx = {
  sessionManager: { getEntries: () => [...state.entries] },
  getContextUsage: () => state.context_usage,
  isIdle: () => !running && queue.length === 0,
  abort() {
    emit("abort");
    if (state.on_abort === "settle") {
      aborted = true;
      release();
    }
  },
};

/** Tell the bridge of an event; the results of its handlers that are not empty, merged. */
async function fire(name, event = {}) {
  let merged;
  for (const handler of handlers.get(name) ?? []) {
    const result = await handler({ type: name, ...event }, ctx);
    if (result) merged = { ...merged, ...result };
  }
  return merged;
}

// --- turns ---------------------------------------------------------------------------------------------------------

function enqueue(details, rule = ruleFor(details)) {
  if (rule.do === "ignore") return emit("ignored", { details });
  queue.push({ details, rule });
  if (!running) setImmediate(begin); // the bridge has acknowledged by then
}

function begin() {
  if (!running && queue.length > 0) void run();
}

const kindOf = (details) => details.assignment_kind ?? details.delivery_kind ?? null;

function ruleFor(details) {
  const fits = (rule, name, value) => rule[name] === undefined || rule[name] === value;
  const rule = state.rules.find(
    (each) => fits(each, "kind", kindOf(details)) && fits(each, "round", details.round) && each.times !== 0,
  );
  if (rule?.times) rule.times -= 1;
  return { do: details.kind === "assignment" ? "report" : "settle", ...rule };
}

async function run() {
  running = true;
  while (queue.length > 0 && !shut) {
    aborted = false;
    try {
      await turn(queue.shift());
    } catch (error) {
      emit("fault", { error: String(error?.stack ?? error) });
    }
    followUps.splice(0).forEach(record);
  }
  running = false;
  if (shut) return;
  await fire("agent_settled");
  emit("settled");
  begin();
}

async function turn({ details, rule }) {
  emit("turn", { kind: kindOf(details), round: details.round ?? null, details });
  await fire("agent_start");
  await fire("turn_start");
  await project();
  if (rule.hold) {
    const released = new Promise((resolve) => (release = resolve));
    emit("held");
    await released;
    release = () => {};
  }
  for (const { name, input = {}, result = `${name} was here` } of rule.tools ?? []) {
    if (aborted) return;
    await speak(rule.usage);
    await call(name, input, async () => ({ content: [{ type: "text", text: result }] }));
  }
  if (aborted || rule.do !== "report") return speak(rule.usage);
  const input = rule.raw ?? { ...reportFor(kindOf(details), details.round), ...rule.report };
  for (let attempt = 0; attempt < (rule.attempts ?? 1) && !aborted && !shut; attempt += 1) {
    await speak(rule.usage);
    const report = tools.get("orchestrator_report");
    const done = await call("orchestrator_report", input, (id) => report.execute(id, input, undefined, undefined, ctx));
    if (done) return;
    await new Promise((resolve) => setTimeout(resolve, 200)); // the bridge reconnects by a timer of its own
  }
}

/** One answer of the model, with what it cost. */
async function speak(usage = {}) {
  const message = {
    role: "assistant",
    usage: { input: 1000, output: 200, cacheRead: 50, cacheWrite: 10, totalTokens: 1260, cost: { total: 0.01 }, ...usage },
  };
  await fire("message_update", { message });
  record({ type: "message", message });
  await fire("message_end", { message });
}

/** One tool call, as far as the bridge lets it; whether it succeeded. */
async function call(name, input, execute) {
  const toolCallId = `call-${(calls += 1)}`;
  const event = { toolName: name, toolCallId, input };
  const verdict = await fire("tool_call", event);
  emit("tool_call", { name, input, blocked: verdict?.block === true, reason: verdict?.reason ?? null });
  if (verdict?.block) return false;
  let outcome;
  let failure = null;
  try {
    outcome = await execute(toolCallId);
  } catch (error) {
    failure = String(error?.message ?? error);
    outcome = { content: [{ type: "text", text: failure }] };
  }
  const changed = await fire("tool_result", { ...event, ...outcome, isError: failure !== null });
  const result = { ...outcome, ...changed };
  record({ type: "message", message: { role: "toolResult", toolCallId, toolName: name, content: result.content } });
  emit("tool_result", failure === null ? { name, ok: true, result } : { name, ok: false, error: failure });
  return failure === null;
}

/** What the bridge would let the model see of the session. */
async function project() {
  const messages = state.entries
    .filter((entry) => entry.type !== "custom")
    .map((entry) => (entry.type === "message" ? entry.message : { ...entry, type: undefined, role: "custom" }));
  const kept = (await fire("context", { messages }))?.messages ?? messages;
  emit("projection", {
    before: JSON.stringify(messages).length,
    after: JSON.stringify(kept).length,
    roles: kept.map((message) => message.role),
  });
}

// --- commands ------------------------------------------------------------------------------------------------------

async function start(settings) {
  configure(settings);
  state.entries = settings.entries ?? [];
  newest = state.entries.findLast((entry) => entry.details?.kind === "assignment")?.details ?? {};
  state.active = settings.tools ?? [];
  const extension = await import(pathToFileURL(process.argv[2]).href);
  await extension.default(pi);
  await fire("session_start");
  emit("started", { idle: ctx.isIdle() });
}

function configure(settings) {
  for (const name of ["rules", "context_usage", "on_abort"]) {
    if (settings[name] !== undefined) state[name] = settings[name];
  }
}

async function shutdown() {
  if (shut) return;
  shut = true;
  release();
  await fire("session_shutdown");
}

await serve(async (command) => {
  if (command.op === "start") await start(command);
  else if (command.op === "set") configure(command);
  else if (command.op === "turn") enqueue(command.details ?? newest, { do: "report", ...command.rule });
  else if (command.op === "continue") release();
  else if (command.op === "shutdown") await shutdown();
  else throw new Error(`unknown op ${command.op}`);
}, shutdown);
