"""Asks for an answer at several doors, with several rights, from a pod: one JSON object of what each got.

    python ask.py JSON

JSON is a list of [NAME, ADDRESS, TOKEN, FOLDER]. An address that begins with https:// is OpenAI's API, another one
gRPC. An empty token is none. The folder has ca.crt, and tls.crt and tls.key if a certificate is to be shown.
"""

import asyncio
import json
import ssl
import sys
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError, omit

from octavo.calls.tls import TlsOptions
from octavo.client import Client
from octavo.errors import OctavoError

PROMPT = "The capital of Japan is"


async def by_openai(url: str, token: str, tls: TlsOptions) -> str:
    """Return an answer of OpenAI's API."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    async with AsyncOpenAI(
        base_url=url,
        api_key=token or "none",
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(verify=context),
    ) as client:
        answer = await client.completions.create(
            model="my-model",
            prompt=PROMPT,
            max_tokens=8,
            temperature=0,
            extra_headers=None if token else {"Authorization": omit},
        )
    return answer.choices[0].text


async def by_grpc(address: str, token: str, tls: TlsOptions) -> str:
    """Return an answer of GenerationService."""
    async with Client(address, tls=tls, token=token or None) as client:
        return (await client.generate(PROMPT, max_tokens=8, temperature=0)).outputs[0].text


async def ask(address: str, token: str, folder: Path) -> str:
    """Return the answer, or the name of the refusal."""
    pair = (folder / "tls.crt", folder / "tls.key") if (folder / "tls.crt").exists() else (None, None)
    by = by_openai if address.startswith("https://") else by_grpc
    try:
        async with asyncio.timeout(20):
            return await by(address, token, TlsOptions(folder / "ca.crt", *pair))
    except (OctavoError, OpenAIError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return type(error).__name__


async def main(questions: list[list[str]]) -> None:
    """Ask all at once."""
    answers = await asyncio.gather(*(ask(address, token, Path(folder)) for _, address, token, folder in questions))
    print(json.dumps(dict(zip((name for name, *_ in questions), answers, strict=True))))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
