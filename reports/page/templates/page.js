// Filters the table of all results and shows single runs. The rows are text in the element #data:
// base64 of deflated JSON, tables of columns (page/results.py). Text becomes text, never markup.
"use strict";
(() => {
  const STEP = 30;
  const at = (id) => document.getElementById(id);
  const FILTERS = ["verdict", "case", "tensor", "ranks", "rank", "base", "chain", "backend"];
  let data, rows, runs, order, found = [], shown = 0;

  function element(tag, text, className) {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    if (className) e.className = className;
    return e;
  }

  async function load() {
    const packed = atob(at("data").textContent.trim()), bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(inflated).text());
  }

  const text = (i) => data.texts[i];
  const number = (s) => (s === "inf" ? Infinity : s === "" || s === "nan" || s === "–" ? NaN : Number(s.replaceAll(",", "")));
  const kind = (i) => data.verdicts[i];
  const again = (n) => (runs.again[n] ? text(runs.again[n]) : `deltaproof run --id '${runs.id[n]}'`);

  // Of row i, what a filter looks at.
  const value = {
    verdict: (i) => kind(rows.verdict[i]),
    case: (i) => data.cases[runs.case[rows.run[i]]][0],
    tensor: (i) => text(rows.name[i]),
    ranks: (i) => String(runs.ranks[rows.run[i]]),
    rank: (i) => (rows.rank[i] < 0 ? "" : String(rows.rank[i])),
    base: (i) => text(runs.base[rows.run[i]]),
    chain: (i) => text(runs.chain[rows.run[i]]),
    backend: (i) => text(runs.backend[rows.run[i]]),
  };

  // Failures first, then what is nearest to its limit.
  function sorted() {
    const weight = { fail: 0, pass: 1, unjudged: 2, skipped: 3 };
    const over = rows.over.map(number);
    const key = (i) => (Number.isNaN(over[i]) ? (value.verdict(i) === "fail" ? Infinity : -1) : over[i]);
    return [...rows.run.keys()].sort(
      (a, b) => weight[value.verdict(a)] - weight[value.verdict(b)] || (key(b) > key(a) ? 1 : key(b) < key(a) ? -1 : a - b)
    );
  }

  function fill(name) {
    const select = at("f-" + name);
    let values = [...new Set(rows.run.map((_, i) => value[name](i)))].filter((v) => v !== "");
    if (name === "ranks" || name === "rank") values.sort((a, b) => a - b);
    if (name === "tensor") values = data.order.filter((v) => values.includes(v));
    select.append(new Option("all", ""));
    if (name === "verdict") select.append(new Option("not passed", "!pass"));
    for (const v of values) select.append(new Option(v, v));
    select.closest("label").hidden = values.length < 2;
  }

  function filter() {
    const wanted = FILTERS.map((n) => [n, at("f-" + n).value]).filter(([, v]) => v !== "");
    const words = at("f-text").value.toLowerCase().split(/\s+/).filter((w) => w);
    const holds = (i) =>
      wanted.every(([n, v]) => (v === "!pass" ? value[n](i) !== "pass" : value[n](i) === v)) &&
      (!words.length || words.every((w) => haystack(i).includes(w)));
    found = order.filter(holds);
    const of = found.length === 1 ? "1 result" : `${found.length.toLocaleString("en")} results`;
    at("count").textContent = found.length ? `${of} of ${order.length.toLocaleString("en")}; failures first, then by error / limit.` : "No result is left by this filter.";
    at("rows").replaceChildren();
    shown = 0;
    if (found.length) more();
    at("more").hidden = shown >= found.length;
  }

  const haystack = (i) =>
    [runs.id[rows.run[i]], text(rows.name[i]), text(rows.why[i]), text(runs.why[rows.run[i]])].join(" ").toLowerCase();

  function mark(verdict) {
    const e = element("td", undefined, "v");
    e.append(element("span", verdict === "fail" ? "FAIL" : verdict, { fail: "f", pass: "" }[verdict] ?? "u"));
    return e;
  }

  function table(heads, caption) {
    const t = element("table"), head = element("thead"), line = element("tr");
    if (caption) t.append(element("caption", caption));
    for (const [name, className] of heads) {
      const th = element("th", name, className);
      th.scope = "col";
      line.append(th);
    }
    head.append(line);
    t.append(head, element("tbody"));
    return t;
  }

  const HEADS = [["verdict"], ["tensor"], ["run"], ["ranks", "n"], ["rel. error", "n"], ["error / limit", "n"], ["judged by"], ["worst row"]];

  function more() {
    let t = at("rows").firstChild;
    if (!t) at("rows").append((t = table(HEADS)));
    for (const i of found.slice(shown, shown + STEP)) t.tBodies[0].append(row(i));
    shown = Math.min(shown + STEP, found.length);
    at("more").hidden = shown >= found.length;
    at("more").textContent = `${Math.min(STEP, found.length - shown)} more`;
  }

  function row(i) {
    const tr = element("tr"), n = rows.run[i], where = element("td"), link = element("a", runs.id[n]);
    link.href = `#run-${n}`;
    where.append(link);
    tr.append(mark(value.verdict(i)), element("td", text(rows.name[i]) || "–"), where);
    tr.append(element("td", value.ranks(i), "n"), element("td", rows.error[i] || "–", "n"));
    tr.append(element("td", rows.over[i] || "–", "n"), element("td", text(rows.by[i])));
    tr.append(element("td", rows.at[i] || text(rows.why[i]) || text(runs.why[n]), "num"));
    return tr;
  }

  // 0x1.8p-3 -> 0.1875
  function decimal(hex) {
    const m = /^(-?)0x([01])\.?([0-9a-f]*)p([+-]?\d+)$/i.exec(hex);
    if (!m) return hex;
    let x = parseInt(m[2], 16);
    for (let k = 0; k < m[3].length; k++) x += parseInt(m[3][k], 16) * 16 ** -(k + 1);
    return `${Number(((m[1] ? -1 : 1) * x * 2 ** Number(m[4])).toPrecision(9))} (${hex})`;
  }

  function command(title, line) {
    const p = element("p", undefined, "small");
    p.append(element("b", title), " ", element("code", line, "id"));
    return p;
  }

  function showCase(k) {
    const [name, reason, facts, warnings] = data.cases[k];
    const out = [element("h3", name), element("p", [reason, facts].filter((x) => x).join(". "), "small")];
    for (const w of warnings) out.push(element("p", w, "warn small"));
    return out;
  }

  const TENSORS = [["tensor"], ["verdict"], ["rel. error", "n"], ["bound", "n"], ["error / bound", "n"], ["error / limit", "n"], ["rank by rank"], ["worst row: rank, sequence, token, head [entry]"], ["got"], ["want"], ["row error", "n"], ["why"]];

  function scrolled(t, label) {
    const div = element("div", undefined, "wide");
    div.tabIndex = 0;
    div.role = "region";
    div.ariaLabel = label;
    div.append(t);
    return div;
  }

  function showRun(n) {
    const out = showCase(runs.case[n]), t = table(TENSORS);
    out.push(command("Again", again(n)));
    const why = text(runs.why[n]), policy = text(runs.policy[n]);
    if (why) out.push(element("p", `${kind(runs.verdict[n])}: ${why}`));
    out.push(element("p", [policy, runs.facts[n]].filter((x) => x).join(", "), "small soft"));
    for (let i = rows.run.indexOf(n); i >= 0 && rows.run[i] === n; i++) {
      if (!rows.name[i]) continue;
      const tr = element("tr"), head = element("th", text(rows.name[i]));
      head.scope = "row";
      tr.append(head, mark(value.verdict(i)));
      for (const k of ["error", "bound", "ratio", "over"]) tr.append(element("td", rows[k][i] || "–", "n"));
      tr.append(element("td", rows.ranks[i], "num"), element("td", rows.at[i], "num"));
      for (const k of ["got", "want"]) tr.append(element("td", decimal(rows[k][i]), "num"));
      tr.append(element("td", rows.row[i], "n"));
      tr.append(element("td", [text(rows.by[i]), text(rows.why[i])].filter((x) => x).join(": ")));
      t.tBodies[0].append(tr);
    }
    if (t.tBodies[0].rows.length) out.push(scrolled(t, "Tensors of the run"));
    if (runs.points[n]) {
      const c = table([["rank", "n"], ["chunks", "n"], ["|dM| / |M|", "n"], ["|dM S_in| / |S_in|", "n"], ["bound / |M|", "n"], ["|M|", "n"]], "M over chunks");
      for (const p of runs.points[n]) {
        const tr = element("tr");
        for (const x of p) tr.append(element("td", x, "n"));
        c.tBodies[0].append(tr);
      }
      out.push(scrolled(c, "M over chunks"));
    }
    return out;
  }

  function follow() {
    const m = /^#(run|case)-(\d+)$/.exec(location.hash);
    if (!m) return;
    const n = Number(m[2]), panel = at("run");
    if (n >= (m[1] === "run" ? runs.id.length : data.cases.length)) return;
    const close = element("button", "close");
    close.type = "button";
    close.addEventListener("click", () => { panel.hidden = true; history.replaceState(null, "", "#results"); at("rows").focus(); });
    panel.replaceChildren(...(m[1] === "run" ? showRun(n) : showCase(n)), close);
    panel.hidden = false;
    if (m[1] === "case") {
      at("filter").reset();
      at("f-case").value = data.cases[n][0];
      filter();
    }
    panel.focus({ preventScroll: true });
    panel.scrollIntoView({ block: "start" });
  }

  async function start() {
    data = await load();
    ({ rows, runs } = data);
    order = sorted();
    FILTERS.forEach(fill);
    const form = at("filter");
    form.hidden = false;
    if (rows.verdict.some((v) => kind(v) === "fail" || kind(v) === "unjudged")) at("f-verdict").value = "!pass";
    form.addEventListener("input", filter);
    form.addEventListener("submit", (e) => e.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    at("more").addEventListener("click", more);
    addEventListener("hashchange", follow);
    filter();
    follow();
    document.documentElement.dataset.ready = Math.round(performance.now());
  }

  // After the first paint: what the page says without the table does not wait for it.
  addEventListener("load", () => setTimeout(() => start().catch((e) => {
    at("count").textContent = `The table of results cannot be shown (${e}); results.json beside this page has every number.`;
  })));
})();
