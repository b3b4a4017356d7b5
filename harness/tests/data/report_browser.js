// What report_browser.py asks of a page: each function returns what is wrong, "" where nothing is.
({
  // Elements with text of their own whose colour is too near to what lies behind it.
  contrast() {
    const rgb = (s) => (s.match(/[\d.]+/g) || []).map(Number);
    const linear = (x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
    const behind = (e) => {
      for (; e; e = e.parentElement) {
        const s = getComputedStyle(e), c = rgb(s.backgroundColor);
        if (s.backgroundImage.includes("gradient")) return [221, 221, 221];
        if (c.length === 3 || c[3] > 0.99) return c;
      }
      return [255, 255, 255];
    };
    const silent = ["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"];
    const out = new Set();
    for (const e of document.querySelectorAll("body *")) {
      const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own || silent.includes(e.tagName) || !e.getClientRects().length) continue;
      const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
      if (Math.max(a, b) / Math.min(a, b) < 4.5) out.add(`${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`);
    }
    return [...out].slice(0, 5).join("; ");
  },

  // What somebody who does not see the page, or uses no mouse, needs.
  access() {
    const all = (s) => [...document.querySelectorAll(s)], bad = [];
    for (const s of ["header", "nav", "main", "footer", "h1", "html[lang]"])
      if (all(s).length !== 1) bad.push(`${all(s).length} of ${s}`);
    const label = (e) => e.closest("label")?.textContent.trim();
    const never = {
      "th without scope": all("th:not([scope])"),
      "picture without text": all("img:not([alt]), svg[role=img]:not([aria-label])"),
      "field without label": all("select, input").filter((e) => !label(e)),
      "scrolled table without name or key": all(".wide:not([tabindex]), .wide:not([aria-label])"),
      "link without text": all("a, button, summary").filter((e) => e.getClientRects().length && !e.textContent.trim()),
    };
    for (const [what, which] of Object.entries(never)) if (which.length) bad.push(`${which.length} times ${what}`);
    const regions = all("[role=region]").map((e) => e.getAttribute("aria-label"));
    const twice = regions.find((name, i) => regions.indexOf(name) !== i);
    if (twice !== undefined) bad.push(`two regions called ${twice}`);
    const ids = all("[id]").map((e) => e.id);
    if (new Set(ids).size !== ids.length) bad.push("an id twice");
    const levels = all("h1, h2, h3").map((e) => Number(e.tagName[1]));
    if (levels.some((l, i) => i && l > levels[i - 1] + 1)) bad.push("a heading level left out");
    for (const a of all('a[href^="#"]').map((e) => e.getAttribute("href")))
      if (!/^#(run|case)-\d+$/.test(a) && !document.getElementById(a.slice(1))) bad.push(`no target: ${a}`);
    return bad.join("; ");
  },
})
