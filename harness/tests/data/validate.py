"""validate.py SCHEMA RECORD..: does each record fit the schema? By the package jsonschema.

Exit status 0, 1 (what does not fit is printed), 77: the package is not there."""

import json
import sys

try:
    from jsonschema import Draft202012Validator
except ImportError:
    print("python3 has no jsonschema (apt-get install python3-jsonschema)")
    sys.exit(77)


def read(path: str) -> object:
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def main() -> int:
    schema = read(sys.argv[1])
    Draft202012Validator.check_schema(schema)
    wrong = [
        f"{path}: {error.json_path}: {error.message[:200]}"
        for path in sys.argv[2:]
        for error in Draft202012Validator(schema).iter_errors(read(path))
    ]
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
