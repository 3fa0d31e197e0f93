"""An engine's process without an engine: it answers as an adapter does, and fails as its argument says."""

import json
import sys
import time


def main(way: str) -> None:
    options = json.loads(sys.stdin.readline())
    if way == "breaks at the start":
        print("loading", "the model is broken", "", sep="\n", file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"versions": {"fake": "1"}, "settings": {"threads": str(options["num_threads"])}}), flush=True)
    for number, line in enumerate(sys.stdin):
        requests = json.loads(line)["requests"]
        lengths = [request["output_tokens"] for request in requests]
        if way == "hangs":
            time.sleep(60)
        if way == "says an error":
            print(json.dumps({"error": "RuntimeError: out of memory"}), flush=True)
            continue
        if way == "is short":
            lengths[-1] -= 1
        if way == "dies later" and number == 3:
            sys.exit(1)
        seconds = {"is slow": 4.0}.get(way, 2.0)
        answer = {"seconds": seconds, "first_token_s": [0.5] * len(requests), "output_tokens": lengths}
        if way != "keeps its tokens":
            token_ids = [request["prompt"][:1] * length for request, length in zip(requests, lengths, strict=True)]
            if way == "errs once":
                token_ids[-1][-1] += 1
            answer["token_ids"] = token_ids
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
