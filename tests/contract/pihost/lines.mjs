// SPDX-License-Identifier: Apache-2.0
// Lines of JSON on the standard streams, for the drivers beside this file.

import { writeSync } from "node:fs";
import { createInterface } from "node:readline";

/** Print one event. Synchronous, so that what has happened is told even if the process is killed next. */
export function emit(event, fields = {}) {
  let rest = Buffer.from(JSON.stringify({ event, ...fields }) + "\n");
  while (rest.length > 0) {
    try {
      rest = rest.subarray(writeSync(1, rest));
    } catch (error) {
      if (error.code === "EPIPE") process.exit(0); // nobody listens any more
      if (error.code !== "EAGAIN") throw error;
    }
  }
}

/** Call `handle(command)` for each line in turn; at the end of the input call `finish` and exit. */
export async function serve(handle, finish) {
  process.on("uncaughtException", (error) => emit("fault", { error: String(error?.stack ?? error) }));
  process.on("unhandledRejection", (error) => emit("fault", { error: String(error?.stack ?? error) }));
  for await (const line of createInterface({ input: process.stdin })) {
    try {
      await handle(JSON.parse(line));
    } catch (error) {
      emit("fault", { error: String(error?.stack ?? error) });
    }
  }
  await finish();
  process.exit(0);
}
