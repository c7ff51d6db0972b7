"""Records the run that the demo opens with: python scripts/record_trace.py

A real search of the default model, as the demo would run it. Step times are left out: they are this machine's.
"""

import argparse
import json
from pathlib import Path

from cowbeam.decoder import Decoder
from cowbeam.ui.decoders import Decoders
from cowbeam.ui.engine_thread import search_records
from cowbeam.ui.run import Run, to_json
from cowbeam.ui.settings import Settings

TARGET = Path(__file__).resolve().parent.parent / "ui" / "static" / "recorded_run.json"
PROMPT = "Tell a short story about a lighthouse keeper who finds a letter in a bottle."
NOTE = "A recorded run of the default model. Press Generate to watch your own prompt live."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--no-repeat-ngram-size", type=int, default=3)
    options = vars(parser.parse_args())
    out = options.pop("out")
    settings = Settings.from_values(options)
    decoders = Decoders(Decoder.from_pretrained(device="cpu", block_size=8, num_blocks=8))
    records = [{k: v for k, v in r.items() if k != "ms"} for r in search_records(decoders, Run(settings))]
    for record in records:
        if record.get("stats"):
            record["stats"].pop("seconds")
    json.loads(line := to_json({"records": records, "note": NOTE}))
    out.write_text(line + "\n", encoding="utf-8")
    print(f"{out}: {len(records)} records, {len(line):,} bytes; {records[-1]['best']!r}")


if __name__ == "__main__":
    main()
