"""The museum's records (DIR/museum.json and DIR/kernels.json, formats: harness/museum.h) as sections of the page; nothing is counted here that they do not say.
   load(path), load_kernels(path) -> dict or None when there is no such file;   section(museum), kernels_section(kernels) -> str"""
import html
import json
import os

from record import Malformed
from view import plural, whole

esc = html.escape
FAULT = {"name": str, "bug": int, "stage": str, "what": str, "source": str, "runs": int, "acted": int, "red": int, "seen": (dict, type(None)), "ranks": (int, type(None)),
         "located": (dict, type(None)), "locations": dict, "fla": dict}
KERNEL = {"name": str, "bug": int, "what": str, "red": int, "right": bool, "fla": bool, "seen": (dict, type(None))}
BUG = {"number": int, "what": str, "note": str, "faults": list}


def check(path, where, row, fields):
    for k, t in fields.items():
        if not isinstance(row, dict) or k not in row or not isinstance(row[k], t):
            raise Malformed(f"{path}: {where}.{k}: missing or not of its type")


def read(path, schema):
    try:
        with open(path, encoding="utf-8") as f:
            m = json.load(f)
    except (OSError, ValueError) as e:
        raise Malformed(f"{path}: {e}")
    if not isinstance(m, dict) or m.get("schema") != schema or m.get("schema_version") != 1:
        raise Malformed(f'{path}: schema: expected "{schema}", version 1')
    return m


def load_kernels(path):
    if not os.path.exists(path):
        return None
    m = read(path, "deltaproof-museum-kernels")
    check(path, "top", m, {"faults": list, "clean": dict})
    for i, f in enumerate(m["faults"]):
        check(path, f"faults[{i}]", f, KERNEL)
    return m


def load(path):
    if not os.path.exists(path):
        return None
    m = read(path, "deltaproof-museum")
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
        out.append(f"Of {plural(of, 'red run')} that were looked into, {whole(right)} ({100 * right / of:.0f}%) were located at the fault's own stage, on a rank and head where it had acted.")
    if none:
        out.append(f"The thresholds of FLA's own tests (relative RMS error of a whole tensor) see no red run of {', '.join(none)}" + (f", and only some of {', '.join(some)}" if some else "") + ".")
    return out


def problem_of(run_id, T=None):
    """'smoke-kda:backend=cuda,ranks=2,base=fp32,chain=fp32' -> 'smoke-kda, 2 ranks, fp32': what the museum does not vary is left out."""
    case, _, rest = run_id.partition(":")
    key = dict(x.split("=", 1) for x in rest.split(",") if "=" in x)
    chain = [f"{key['chain']} chain"] if key.get("chain", "fp32") != "fp32" else []
    return ", ".join([case] + ([f"T {T}"] if T else []) + ([plural(int(key["ranks"]), "rank")] if key.get("ranks", "").isdigit() else []) + ([key["base"]] if key.get("base") else []) + chain)


def shown_by(s):
    return f'{esc(problem_of(s["id"], s.get("T")))} <span class="x">{esc(s["tensor"])}, {esc(s["tier"])}</span>' if s else "<strong>not seen</strong>"


def row(f):
    p = f["located"]
    place = "–" if not p else p["stage"] + "".join(f", {k} {p[k]}" for k in ("rank", "head") if p[k] >= 0)
    fla = f"{f['fla']['red']} of {f['fla']['of']}" if f["fla"]["of"] else "–"
    cells = [("", f'<strong>{esc(f["name"])}</strong>: {esc(f["what"])} <span class="x">{esc(f["source"])}</span>'), ("n", f["bug"] or "–"), ("n", f"{f['red']} of {f['acted']}"), ("", shown_by(f["seen"])),
             ("", esc(place)), ("n", f"{f['locations']['right']} of {f['locations']['of']}"), ("n", fla)]
    return "<tr>" + "".join(f'<td class="{c}">{v}</td>' for c, v in cells) + "</tr>"


def section(m):
    rows = "".join(row(f) for f in m["faults"] if f["runs"])
    without = "".join(f"<li>Row {b['number']}, {esc(b['what'])}: {esc(b['note'])}.</li>" for b in m["bugs"] if not b["faults"])
    notes = "".join(f"<li>Row {b['number']}: {esc(b['note'])}.</li>" for b in m["bugs"] if b["faults"] and b["note"])
    return ('<h2 id="museum">Museum of faults</h2>\n<p class="small">Faults that reached users of such kernels, switched on one at a time in the simulated ranks. Red: runs whose verdict fails, of those in which '
            "the fault changed anything. Located: the first stage that is wrong when every stage is run on true inputs; right, when that is the fault's own stage, on a rank and head where it acted. "
            "FLA: red runs that are above the thresholds of FLA's tests, of those that are below them without the fault.</p>\n<ul>" + "".join(f"<li>{esc(s)}</li>" for s in sentences(m)) + "</ul>\n"
            '<div class="wide"><table><thead><tr><th>fault</th><th class="n">row</th><th class="n">red</th><th>smallest problem that shows it, worst tensor</th>'
            f'<th>located</th><th class="n">right</th><th class="n">FLA</th></tr></thead><tbody>{rows}</tbody></table></div>\n'
            f'<details><summary>Rows of the list: which have no fault, and how the others are expressed</summary><ul>{without}{notes}</ul></details>\n<p class="small">All again: <code class="id">make museum</code></p>')


def kernel_row(f):
    s = f["seen"]
    says = (s["source"] or s["says"]) if s else ""
    cells = [("", f'<strong>{esc(f["name"])}</strong>: {esc(f["what"])}'), ("n", f["bug"] or "–"), ("", shown_by(s)), ("", f'rank {s["rank"]}, head {s["head"]}' if s and s["rank"] >= 0 else "–"),
             ("v", "yes" if f["fla"] else "no"), ("", esc(says))]
    return "<tr>" + "".join(f'<td class="{c}">{v}</td>' for c, v in cells) + "</tr>"


def kernels_section(m):
    seen, n = sum(f["red"] > 0 for f in m["faults"]), len(m["faults"])
    rows = "".join(kernel_row(f) for f in m["faults"])
    return ('<h3 id="kernels">Faults of the CUDA kernels</h3>\n<p class="small">Switched on one at a time in a test build of the kernels that runs thread by thread on the CPU, from the smallest problem up until a '
            f"verdict fails. {seen} of {plural(n, 'fault')} seen, {sum(f['right'] for f in m['faults'])} first in a tensor that can show them; without a fault {m['clean'].get('red')} of {plural(m['clean'].get('runs', 0), 'run')} "
            'were red. The last column: whose data the exact cases find in the wrong rows, else why the run failed.</p>\n'
            '<div class="wide"><table><thead><tr><th>fault</th><th class="n">row</th><th>smallest problem that shows it, first wrong tensor</th><th>worst at</th><th>FLA sees it</th>'
            f'<th>what the verdict says</th></tr></thead><tbody>{rows}</tbody></table></div>')
