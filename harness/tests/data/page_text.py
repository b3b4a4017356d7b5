"""page_text.py PAGE: the text that a reader of a report sees, without tags. Each text of its table
of all results follows, a line each."""

import base64
import json
import re
import sys
import zlib
from html import unescape
from pathlib import Path
from typing import Any


def texts(x: Any) -> list[str]:
    if isinstance(x, str):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list) else []
    return [t for part in parts for t in texts(part)]


page = Path(sys.argv[1]).read_text(encoding="utf-8")
data = re.search(r'<script type="text/plain" id="data">([^<]*)<', page)
seen = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
print(unescape(re.sub(r"<[^>]*>", "", seen)))
if data:
    print("\n".join(texts(json.loads(zlib.decompress(base64.b64decode(data[1]))))))
