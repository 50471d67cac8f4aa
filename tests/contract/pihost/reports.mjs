// SPDX-License-Identifier: Apache-2.0
// A plausible report for each kind of assignment, for when a test has no wish of its own.

const IMPLEMENTATION = { changed_paths: ["src/feature.py"], checks: [{ name: "unit tests", status: "passed" }] };
const PLAN = {
  relevant_paths: ["src/feature.py"],
  relevant_symbols: ["feature"],
  intended_changes: ["Add the feature."],
  required_checks: ["unit tests"],
  risks: [],
  open_questions: [],
};
const MEMBERS = {
  implementation: IMPLEMENTATION,
  plan: PLAN,
  review: { verdict: "approved" },
  probe: {},
  playwright: { verdict: "pass" },
  django: { verdict: "advisory_approved" },
};

export function reportFor(kind, round) {
  return { kind, summary: `${kind} of round ${round} is done.`, ...MEMBERS[kind] };
}
