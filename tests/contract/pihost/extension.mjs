// SPDX-License-Identifier: Apache-2.0
// A scripted stand-in for Pi that hosts the whole published extension, as the Pi of a person does that starts teams:
// `node extension.mjs MODULE`. What the extension runs is run, in this process's environment and directory.
//
// Commands, a line each:
//   {op:"start", models?, session?}     load the extension and begin the session; models: [{provider, id, …}]
//   {op:"call", params}                 the model calls the tool
//   {op:"command", name, args?}         the person types /NAME ARGS
//   {op:"answer", value}                the person answers the question that is open
//   {op:"key", data}                    the person types into what is drawn
//   {op:"look"}                         draw what is shown once more
//   {op:"shutdown"}                     end the session, not the process
//
// Events: registered {tool | command}; started; exec {argv, options}, then exited {argv, code, stdout, stderr}; result
// {ok, text, details | error} of a call; done {name, ok, error} of a command; asked {how, title, rest}; told {text, kind};
// drawn {lines}; closed {value}; message {message, options}; entry {entry}; fetched {url}; fault {error}

import { spawn } from "node:child_process";
import { pathToFileURL } from "node:url";
import { emit, serve } from "./lines.mjs";

const handlers = new Map();
const tools = new Map();
const commands = new Map();
const entries = [];
const questions = [];
let models = [];
let shown = null;
let shut = false;

// It asks the package registry whether there is a newer version of itself.
globalThis.fetch = async (url) => {
  emit("fetched", { url: String(url) });
  throw new TypeError("fetch failed");
};

// --- the session ---------------------------------------------------------------------------------------------------

const pi = {
  registerTool(tool) {
    tools.set(tool.name, tool);
    emit("registered", { tool: { name: tool.name, description: tool.description, parameters: tool.parameters } });
  },
  registerCommand(name, command) {
    commands.set(name, command);
    emit("registered", { command: { name, description: command.description } });
  },
  on(name, handler) {
    handlers.set(name, [...(handlers.get(name) ?? []), handler]);
  },
  sendMessage(message, options = {}) {
    entries.push({ type: "custom_message", ...message });
    emit("message", { message, options });
  },
  appendEntry(customType, data) {
    entries.push({ type: "custom", customType, data });
    emit("entry", { entry: entries.at(-1) });
  },
  getThinkingLevel: () => "off",
  getActiveTools: () => [...tools.keys()],
  setActiveTools() {},
  exec,
};

/** Run a program to its end, as Pi does it for its extensions. */
function exec(program, words, { cwd, timeout, signal, ...rest } = {}) {
  const argv = [program, ...words];
  emit("exec", { argv, options: { cwd, timeout, ...rest } });
  return new Promise((resolve) => {
    const child = spawn(program, words, { cwd, timeout, signal, stdio: ["ignore", "pipe", "pipe"] });
    const said = { stdout: "", stderr: "" };
    for (const stream of ["stdout", "stderr"]) {
      child[stream].setEncoding("utf8").on("data", (text) => (said[stream] += text));
    }
    child.on("error", (error) => (said.stderr += String(error)));
    child.on("close", (code) => {
      emit("exited", { argv, code, ...said });
      resolve({ ...said, code: code ?? 1, killed: child.killed });
    });
  });
}

// --- the person ----------------------------------------------------------------------------------------------------

const ask = (how) => (title, ...rest) => {
  emit("asked", { how, title, rest });
  return new Promise((resolve) => questions.push(resolve));
};

const plain = (text) => text.replace(/\x1b\[[0-9;]*m/g, "");
const theme = { fg: (_, text) => text, bg: (_, text) => text, bold: (text) => text };
const terminal = { columns: 120, rows: 40 };

function draw() {
  if (shown) emit("drawn", { lines: shown.render(terminal.columns).map(plain) });
}

/** Show a component until it says that it is done. */
function custom(make) {
  return new Promise((resolve, reject) => {
    const done = (value) => {
      shown?.dispose?.();
      shown = null;
      emit("closed", { value: value ?? null });
      resolve(value);
    };
    const tui = { requestRender: () => setImmediate(draw), terminal };
    Promise.resolve(make(tui, theme, { matches: () => false }, done)).then((component) => {
      shown = component;
      draw();
    }, reject);
  });
}

const ctx = {
  cwd: process.cwd(),
  hasUI: true,
  mode: "tui",
  ui: {
    confirm: ask("confirm"),
    select: ask("select"),
    input: ask("input"),
    editor: ask("editor"),
    notify: (text, kind) => emit("told", { text, kind }),
    setStatus() {},
    custom,
  },
  modelRegistry: { getAvailable: () => models },
  sessionManager: { getEntries: () => [...entries] },
  isProjectTrusted: () => true,
  isIdle: () => true,
};

async function fire(name) {
  for (const handler of handlers.get(name) ?? []) await handler({ type: name }, ctx);
}

// --- commands ------------------------------------------------------------------------------------------------------

async function start(settings) {
  models = settings.models ?? [];
  ctx.model = models[0];
  const extension = await import(pathToFileURL(process.argv[2]).href);
  await extension.default(pi);
  await fire("session_start");
  emit("started");
}

async function call(params) {
  try {
    const [tool] = tools.values();
    const { content, details } = await tool.execute("call-1", params, undefined, () => {}, ctx);
    emit("result", { ok: true, text: content.map((part) => part.text).join("\n"), details });
  } catch (error) {
    emit("result", { ok: false, error: String(error?.message ?? error) });
  }
}

async function command(name, args) {
  try {
    await commands.get(name).handler(args, ctx);
    emit("done", { name, ok: true });
  } catch (error) {
    emit("done", { name, ok: false, error: String(error?.message ?? error) });
  }
}

async function shutdown() {
  if (shut) return;
  shut = true;
  await fire("session_shutdown");
}

await serve(async ({ op, ...given }) => {
  // What takes a person's answers cannot be waited for here.
  if (op === "start") await start(given);
  else if (op === "call") void call(given.params);
  else if (op === "command") void command(given.name, given.args ?? "");
  else if (op === "answer") questions.shift()(given.value);
  else if (op === "key") shown.handleInput(given.data);
  else if (op === "look") draw();
  else if (op === "shutdown") await shutdown();
  else throw new Error(`unknown op ${op}`);
}, shutdown);
