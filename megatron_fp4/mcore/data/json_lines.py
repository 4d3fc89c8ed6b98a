"""The text in a line of a JSON lines file, which is a JSON object with the text under some key."""

import json


class BadLine(ValueError):
    """A line has no usable text. The message has the reason, and what to do."""


def text_of(line: str, json_key: str) -> str:
    """The string under `json_key` of the JSON object in `line`.

    line: decoded from UTF-8, with surrogate characters for bytes that are not UTF-8
    (errors="surrogateescape"). Half of a surrogate pair in the JSON string becomes "?".
    Raises BadLine.
    """
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - 0xDC00
        raise BadLine(
            f"not UTF-8: byte 0x{byte:02x} after {error.start} characters; mend or delete "
            "the line, or convert the file (iconv -c -t utf-8 drops such bytes)"
        ) from error
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not a JSON object: {error}") from error
    text = record.get(json_key) if isinstance(record, dict) else None
    if isinstance(record, dict) and json_key in record and not isinstance(text, str):
        raise BadLine(f'what the key "{json_key}" has is no string: mend or delete the line')
    if not isinstance(text, str):
        raise BadLine(f'no text under the key "{json_key}"; name the key by --json-key')
    return text.encode(errors="replace").decode()  # JSON can contain half of a surrogate pair
