"use strict";

// Everything that comes from the hub becomes text, never markup.

const EVERY_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);
const number = (n) => Math.round(n).toLocaleString("en");
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "-");

function element(name, content = "", attributes = {}) {
  const made = document.createElement(name);
  made.append(content);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawing(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function bytes(n) {
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (n < 1024) break;
    n /= 1024;
    unit = larger;
  }
  return `${n >= 100 || unit === "B" ? Math.round(n) : n.toFixed(1)} ${unit}`;
}

function time(seconds) {
  if (seconds === undefined) return "-";
  return seconds < 1e-3 ? `${Math.round(seconds * 1e6)} us` : `${(seconds * 1e3).toFixed(1)} ms`;
}

let page = null; // what the hub sent last
let shown = ""; // what the list of requests was made from

function tiles({ counters, gauges, namespaces }) {
  const count = (name) => counters[name] ?? 0;
  const gauge = (name) => gauges[name] ?? 0;
  const reused = count("tokens_exact") + count("tokens_settled") + count("tokens_moved");
  const [size, reserved] = [gauge("arena_bytes"), gauge("arena_reserved_bytes")];
  const used = reserved - gauge("arena_free_bytes");
  const ratios = Object.values(namespaces).map((one) => one.recompute_ratio);
  const audits = Object.values(namespaces).reduce((sum, one) => sum + (one.recent_audits ?? 0), 0);
  const differed = Object.values(namespaces).reduce((sum, one) => sum + (one.recent_audit_disagreements ?? 0), 0);
  const tile = {
    "lookups that found something": share(count("lookups_that_found"), count("requests_lookup")),
    "tokens found, exact": `${number(count("tokens_exact"))} (${share(count("tokens_exact"), reused)})`,
    "tokens found, settled": `${number(count("tokens_settled"))} (${share(count("tokens_settled"), reused)})`,
    "tokens found, moved": `${number(count("tokens_moved"))} (${share(count("tokens_moved"), reused)})`,
    "arena in use": `${bytes(used)} of ${bytes(size)}${reserved < size ? `, ${bytes(reserved)} reserved so far` : ""}`,
    evictions: `${number(count("evictions"))}, ${number(count("forgotten_chunks"))} lost`,
    "recomputed of moved text, if auto": ratios.length ? ratios.map((ratio) => share(ratio, 1)).join(", ") : "none",
    "sessions, engines": `${number(gauge("sessions"))}, ${number(gauge("engines"))}`,
    "lookup p50, p99": `${time(gauges.seconds_lookup_p50)}, ${time(gauges.seconds_lookup_p99)}`,
    store: `${bytes(gauge("store_bytes"))}, ${number(count("store_failures"))} failures`,
    "audits that agreed": audits ? `${share(audits - differed, audits)} of ${number(audits)}` : "none",
  };
  if ("fleet_hubs" in gauges) tile.fleet = fleet(count, gauge);
  at("tiles").replaceChildren(
    ...Object.entries(tile).map(([name, value]) => {
      const made = element("div", element("dt", name));
      made.append(element("dd", value));
      return made;
    }),
  );
}

function fleet(count, gauge) {
  const seen = gauge("fleet_in_step") ? `${number(gauge("fleet_hubs"))} hubs` : "does not answer";
  const here = gauge("chunks_in_arena");
  const failures = count("fleet_failures") + count("store_failures");
  return `${seen}, ${number(gauge("fleet_behind"))} changes behind, ${number(here)} chunks here, ` +
    `${number(gauge("chunks") - here)} elsewhere, ${number(failures)} failures`;
}

const fate = (name) => page.fates.find((one) => one.name === name);

function strip(report) {
  const made = drawing("svg", {
    class: "strip", role: "img", viewBox: `0 0 ${Math.max(1, report.prompt_tokens)} 1`, preserveAspectRatio: "none",
    "aria-label": page.fates
      .filter((one) => report.tokens[one.name])
      .map((one) => `${number(report.tokens[one.name])} ${one.label}`)
      .join("; "),
  });
  for (const [[start, end], name] of report.strip) {
    const one = drawing("rect", { x: start, y: 0, width: end - start, height: 1, fill: fate(name).colour });
    const title = drawing("title", {});
    title.append(`${number(start)} to ${number(end)}: ${fate(name).label}`);
    one.append(title);
    made.append(one);
  }
  made.append(drawing("rect", {
    class: "frame", x: 0, y: 0, width: Math.max(1, report.prompt_tokens), height: 1, "vector-effect": "non-scaling-stroke",
  }));
  return made;
}

function table(caption, headings, rows) {
  const made = element("table", element("caption", caption));
  const line = (cells, kind) => {
    const row = element("tr");
    cells.forEach((cell, index) => {
      const attributes = kind === "th" ? { scope: "col" } : headings[index] === "why" ? { class: "why" } : {};
      row.append(element(kind, cell, attributes));
    });
    return row;
  };
  made.append(element("thead", line(headings, "th")));
  const body = element("tbody");
  body.append(...rows.map((cells) => line(cells, "td")));
  made.append(body);
  return element("div", made, { class: "wide", tabindex: "0", role: "region", "aria-label": caption });
}

function details(report) {
  const parts = [];
  if (report.reason) parts.push(element("p", report.reason, { class: "reason" }));
  parts.push(table(
    "What became of its tokens", ["tokens", "share", "what", "why"],
    page.fates.filter((one) => report.tokens[one.name]).map((one) => [
      number(report.tokens[one.name]), share(report.tokens[one.name], report.prompt_tokens), one.label, one.why,
    ]),
  ));
  const sources = report.sources ?? [];
  if (sources.length) {
    const more = (report.n_sources ?? 0) - sources.length;
    parts.push(table(
      "Where the reused tokens came from" + (more > 0 ? `, without ${number(more)} more` : ""),
      ["tokens of the prompt", "run", "its tokens", "how"],
      sources.map(([[start, end], run, source, exact, settled]) => [
        `${number(start)} to ${number(end)}`, String(run), `${number(source)} to ${number(source + end - start)}`,
        exact ? "exact" : settled ? "settled" : "moved",
      ]),
    ));
  }
  const computed = report.not_reused ?? [];
  if (computed.length) {
    const more = (report.n_not_reused ?? 0) - computed.length;
    parts.push(table(
      "Why stretches were not reused" + (more > 0 ? `, without ${number(more)} shorter ones` : ""),
      ["tokens of the prompt", "tokens", "why"],
      computed.map(([[start, end], code]) => [
        `${number(start)} to ${number(end)}`, number(end - start), page.messages[code] ?? code,
      ]),
    ));
  }
  return parts;
}

function reusedOf(report) {
  const of = (name) => report.tokens[name] ?? 0;
  return of("exact") + of("settled") + of("moved") + of("recomputed");
}

function row(report) {
  const facts = element("span", "", { class: "facts" });
  facts.append(
    element("span", report.request, { class: "name" }),
    element("span", `${number(report.prompt_tokens)} tokens`),
    element("span", reusedOf(report) ? `${share(reusedOf(report), report.prompt_tokens)} reused` : "nothing reused"),
    element("span", new Date(1000 * report.ended_at).toLocaleTimeString("en-GB"), { class: "dim" }),
  );
  const made = element("details", element("summary", facts), { "data-request": report.request });
  made.firstChild.append(strip(report));
  made.addEventListener("toggle", () => {
    // Made when it is first seen: most never are.
    if (made.open && made.children.length === 1) made.append(...details(report));
  });
  return made;
}

function passes(report) {
  const moved = (report.tokens.moved ?? 0) + (report.tokens.recomputed ?? 0);
  const outcome = { "": true, reused: reusedOf(report) > 0, moved: moved > 0, none: !reusedOf(report) };
  return outcome[at("outcome").value] && report.request.includes(at("request").value.trim());
}

function requests() {
  const chosen = page.reports.filter(passes);
  const made = JSON.stringify([page.engine, chosen.map((report) => [report.request, report.ended_at])]);
  if (made === shown) return;
  shown = made;
  const list = at("requests");
  const open = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.request));
  const focused = document.activeElement?.closest?.("details")?.dataset.request;
  list.replaceChildren(...chosen.map(row));
  for (const one of list.children) {
    if (open.has(one.dataset.request)) one.open = true;
    if (one.dataset.request === focused) one.firstChild.focus();
  }
  at("count").textContent = page.reports.length
    ? `${number(chosen.length)} of the last ${number(page.reports.length)} requests of this engine`
    : "no request of this engine has ended yet";
}

function engines() {
  const select = at("engine");
  const names = page.engines.length ? page.engines : ["none yet"];
  if (JSON.stringify(names) !== JSON.stringify([...select.options].map((one) => one.value))) {
    select.replaceChildren(...names.map((name) => element("option", name, { value: name })));
  }
  if (page.engine) select.value = page.engine;
}

function legend() {
  if (at("legend").children.length) return;
  at("legend").append(...page.fates.map((one) => {
    const key = drawing("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" });
    key.append(
      drawing("rect", { width: 16, height: 16, fill: one.colour }),
      drawing("rect", { class: "frame", x: 0.5, y: 0.5, width: 15, height: 15 }),
    );
    const made = element("li", key);
    made.append(` ${one.label}`);
    return made;
  }));
}

async function update() {
  const engine = page?.engine ? `?engine=${encodeURIComponent(at("engine").value)}` : "";
  try {
    const answer = await fetch(`page.json${engine}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    page = await answer.json();
  } catch (error) {
    at("state").className = "bad";
    at("state").textContent = `the hub does not answer (${error.message}); what is shown may be old`;
    return;
  }
  at("state").className = "";
  at("state").textContent = `as of ${new Date().toLocaleTimeString("en-GB")}`;
  engines();
  tiles(page.stats);
  legend();
  requests();
}

at("filters").addEventListener("submit", (event) => event.preventDefault());
at("engine").addEventListener("change", update);
for (const id of ["request", "outcome"]) at(id).addEventListener("input", () => page && requests());
update();
setInterval(() => at("live").checked && !document.hidden && update(), EVERY_MS);
