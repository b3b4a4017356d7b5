"""The museum's record (DIR/museum.json, format: harness/museum.h) as a section of the page; nothing is counted here that the record does not say.
   load(path) -> dict or None when there is no such file;   section(museum) -> str"""
import html
import json
import os

from record import Malformed
from view import plural

esc = html.escape
FAULT = {"name": str, "bug": int, "stage": str, "what": str, "source": str, "runs": int, "acted": int, "red": int, "seen": (dict, type(None)), "ranks": (int, type(None)),
         "located": (dict, type(None)), "locations": dict, "fla": dict}
BUG = {"number": int, "what": str, "note": str, "faults": list}


def check(path, where, row, fields):
    for k, t in fields.items():
        if not isinstance(row, dict) or k not in row or not isinstance(row[k], t):
            raise Malformed(f"{path}: {where}.{k}: missing or not of its type")


def load(path):
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as f:
            m = json.load(f)
    except (OSError, ValueError) as e:
        raise Malformed(f"{path}: {e}")
    if not isinstance(m, dict) or m.get("schema") != "deltaproof-museum" or m.get("schema_version") != 1:
        raise Malformed(f'{path}: schema: expected "deltaproof-museum", version 1')
    check(path, "top", m, {"faults": list, "bugs": list, "cases": int, "clean": dict})
    for i, f in enumerate(m["faults"]):
        check(path, f"faults[{i}]", f, FAULT)
    for i, b in enumerate(m["bugs"]):
        check(path, f"bugs[{i}]", b, BUG)
    return m


def sentences(m):
    f = [x for x in m["faults"] if x["runs"]]
    seen = [x for x in f if x["red"]]
    right, of = sum(x["locations"]["right"] for x in f), sum(x["locations"]["of"] for x in f)
    known = [x for x in seen if x["fla"]["of"]]
    none, some = [x["name"] for x in known if not x["fla"]["red"]], [x["name"] for x in known if 0 < x["fla"]["red"] < x["fla"]["of"]]
    unseen = [x["name"] for x in f if not x["red"]]
    out = [f"{len(seen)} of {plural(len(f), 'fault')} turn a verdict red" + (f"; not seen: {', '.join(unseen)}" if unseen else "") + ".",
           f"Without a fault {m['clean'].get('red')} of {plural(m['clean'].get('runs', 0), 'run')} of {plural(m['cases'], 'case')} were red."]
    if of:
        out.append(f"Of {plural(of, 'red run')} that were looked into, {right} ({100 * right / of:.0f}%) were located at the fault's own stage, on a rank and head where it had acted.")
    if none:
        out.append(f"The thresholds of FLA's own tests (relative RMS error of a whole tensor) see no red run of {', '.join(none)}" + (f", and only some of {', '.join(some)}" if some else "") + ".")
    return out


def row(f):
    s, p = f["seen"], f["located"]
    problem = s["id"].split(",fault=")[0].replace(",merge=allgather", "") if s else "not seen"
    place = "–" if not p else p["stage"] + "".join(f", {k} {p[k]}" for k in ("rank", "head") if p[k] >= 0)
    fla = f"{f['fla']['red']} of {f['fla']['of']}" if f["fla"]["of"] else "–"
    cells = [("v", f'<strong>{esc(f["name"])}</strong>'), ("", esc(f["what"]) + f' <span class="x">{esc(f["source"])}</span>'), ("n", f["bug"] or "–"), ("n", f"{f['red']} of {f['acted']}"),
             ("", f'<span class="num">{esc(problem)}</span>'), ("v", f'{esc(s["tensor"])}, {esc(s["tier"])}' if s else "–"), ("v", esc(place)), ("n", f"{f['locations']['right']} of {f['locations']['of']}"), ("n", fla)]
    return "<tr>" + "".join(f'<td class="{c}">{v}</td>' for c, v in cells) + "</tr>"


def section(m):
    rows = "".join(row(f) for f in m["faults"] if f["runs"])
    without = "".join(f"<li>Row {b['number']}, {esc(b['what'])}: {esc(b['note'])}.</li>" for b in m["bugs"] if not b["faults"])
    notes = "".join(f"<li>Row {b['number']}: {esc(b['note'])}.</li>" for b in m["bugs"] if b["faults"] and b["note"])
    return ('<h2 id="museum">Museum of faults</h2>\n<p class="small">Faults that reached users of such kernels, switched on one at a time in the simulated ranks. Red: runs whose verdict fails, of those in which '
            "the fault changed anything. Located: the first stage that is wrong when every stage is run on true inputs; right, when that is the fault's own stage, on a rank and head where it acted. "
            "FLA: red runs that are above the thresholds of FLA's tests, of those that are below them without the fault.</p>\n<ul>" + "".join(f"<li>{esc(s)}</li>" for s in sentences(m)) + "</ul>\n"
            '<div class="wide"><table><thead><tr><th>fault</th><th>what it does</th><th class="n">row</th><th class="n">red</th><th>smallest problem that shows it</th><th>worst tensor, tier</th>'
            f'<th>located</th><th class="n">right</th><th class="n">FLA</th></tr></thead><tbody>{rows}</tbody></table></div>\n'
            f'<details><summary>Rows of the list: which have no fault, and how the others are expressed</summary><ul>{without}{notes}</ul></details>\n<p class="small">All again: <code class="id">make museum</code></p>')
