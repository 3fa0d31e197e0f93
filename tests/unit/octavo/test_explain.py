"""`octavo explain`: how an id is found, and what is said of a request."""

import pytest

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import MAX_PAGE_SIZE, AdminClient, NotFoundError
from octavo.commands.command_line import run
from octavo.errors import UnavailableError
from octavo.top.report import Report, Sharing, UnknownRequestError, ask_report, resolve_id
from octavo.top.report_text import event_lines, report_lines
from tests.support.each_row import each_row
from tests.unit.octavo.top.scripted import Scripted, ended, executor, running, state, waiting

EXECUTOR = "127.0.0.1:50061"


def event(kind: str, since_arrival_us: int, text: str, **values: object) -> admin_pb2.RequestEvent:
    number = admin_pb2.RequestEventKind.Value(f"REQUEST_EVENT_KIND_{kind}")
    return admin_pb2.RequestEvent(kind=number, since_arrival_us=since_arrival_us, text=text, **values)  # type: ignore[arg-type]


def lines_of(report: Report) -> list[str]:
    return [line.plain for line in report_lines(report)]


# The id ------------------------------------------------------------------------------------------


async def test_an_id_stands_for_itself_even_if_others_begin_with_it() -> None:
    source = Scripted(live=[running("a"), running("ab")])
    assert await resolve_id(source, "a") == "a"


async def test_a_beginning_that_one_request_has_is_enough() -> None:
    source = Scripted(live=[running("chat-17"), running("batch-17")], ended=[ended("old-1"), ended("chat-17")])
    assert await resolve_id(source, "ch") == "chat-17"
    assert await resolve_id(source, "ol") == "old-1"


@each_row(
    ("chat-", "6 requests have an id that begins with 'chat-': chat-0, chat-1, chat-2 and 3 more"),
    ("ATCH", "no live request has request_id 'ATCH', and none that ended; did you mean Batch-7?"),
    ("batsh-7", "no live request has request_id 'batsh-7', and none that ended; did you mean Batch-7?"),
    (
        "\x1b[2J",
        r"no live request has request_id '\x1b[2J', and none that ended; "
        '"octavo top" lists the requests',
    ),
)
async def test_an_id_that_is_not_there_is_answered_with_those_that_come_near(text: str, sentence: str) -> None:
    source = Scripted(live=[running(f"chat-{i}") for i in range(6)], ended=[ended("Batch-7")])
    with pytest.raises(UnknownRequestError) as caught:
        await resolve_id(source, text)
    assert str(caught.value) == sentence
    assert max(source.limits) == 10 * MAX_PAGE_SIZE


# The report --------------------------------------------------------------------------------------


async def test_a_request_that_waits_shows_what_is_in_the_way_of_each_executor() -> None:
    fits = [
        admin_pb2.ExecutorFit(
            executor=EXECUTOR,
            obstacle="needs 12 blocks, 8 free",
            num_needed_blocks=12,
            num_free_blocks=8,
            num_needed_slots=1,
            num_free_slots=255,
        ),
        admin_pb2.ExecutorFit(
            executor="b:1", num_needed_blocks=9, num_free_blocks=4000, num_needed_slots=1, num_free_slots=256
        ),
    ]
    source = Scripted(
        live=[waiting("a/b", 3200, tenant="red", priority=-2, num_preemptions=1)],
        explanations={
            "a/b": pb.ExplainRequestResponse(status=1, explanation="waits: next in the queue", executors=fits)  # type: ignore[arg-type]
        },
    )
    report = await ask_report(source, "a/b")
    assert lines_of(report) == [
        "a/b   waiting   tenant red   priority -2",
        "waits: next in the queue",
        "",
        "executor         blocks                slots               blocked by",
        "127.0.0.1:50061  12 needed, 8 free     1 needed, 255 free  needs 12 blocks, 8 free",
        "b:1              9 needed, 4,000 free  1 needed, 256 free  nothing",
        "",
        "tokens    100 prompt, 0 output",
        "times     3.2 s old",
        "trouble   preempted 1 time",
        "",
        "live page http://127.0.0.1:50055/#request=a%2Fb",
    ]


async def test_what_is_wrong_with_an_executor_is_said_once() -> None:
    slow = executor(EXECUTOR, warning="a step has been running for 12.5 s")
    silent = executor("b:1", warning="no heartbeat answered for 4.1 s")
    other = executor("c:1", warning="a step has been running for 7.0 s")
    fits = [admin_pb2.ExecutorFit(executor=address, obstacle="needs 2 blocks, 1 free") for address in (EXECUTOR, "b:1")]
    source = Scripted(
        state=state(slow, silent, other),
        live=[waiting("w"), running("r")],
        explanations={
            "w": pb.ExplainRequestResponse(status=1, explanation="waits", executors=fits),  # type: ignore[arg-type]
            "r": pb.ExplainRequestResponse(
                status=2,  # type: ignore[arg-type]
                explanation="runs; on its executor a step has been running for 12.4 s",
                executor=EXECUTOR,
            ),
        },
    )
    lines = lines_of(await ask_report(source, "w"))
    assert f"{EXECUTOR}: a step has been running for 12.5 s" in lines
    assert "b:1: no heartbeat answered for 4.1 s" in lines
    assert not any(line.startswith("c:1") for line in lines)
    assert sum("a step has been running" in line for line in lines_of(await ask_report(source, "r"))) == 1


async def test_a_request_that_runs_says_with_whom_it_shares_blocks() -> None:
    sequences = [
        admin_pb2.SequenceState(output_index=0, block_table=[-1, 0, 1, 2]),
        admin_pb2.SequenceState(output_index=1, block_table=[-1, 0, 1, 3]),
    ]
    source = Scripted(
        live=[running("a", sequences=sequences, num_cached_tokens=32)],
        block_map=pb.GetBlockMapResponse(states=bytes([4, 4, 3, 3])),
        block=pb.GetBlockResponse(holders=[admin_pb2.BlockHolder(request_id=name) for name in "zaxyaw"]),
    )
    report = await ask_report(source, "a")
    assert report.sharing == Sharing(2, ("w", "x", "y", "z"))
    lines = lines_of(report)
    assert "tokens    100 prompt, 10 output, 32 of the prompt came from the prefix cache" in lines
    assert "times     1.0 s old, queued for 5 ms, first token after 30 ms, last token 20 ms ago" in lines
    assert "outputs   2" in lines
    assert "blocks    4 on the device, 2 shared with w, x, y and 1 more" in lines


async def test_outputs_that_share_among_themselves_say_so() -> None:
    sequences = [admin_pb2.SequenceState(output_index=i, block_table=[0, 1 + i]) for i in range(2)]
    source = Scripted(
        live=[running("a", sequences=sequences)],
        block_map=pb.GetBlockMapResponse(states=bytes([4, 3, 3])),
        block=pb.GetBlockResponse(holders=[admin_pb2.BlockHolder(request_id="a")] * 2),
    )
    assert "blocks    3 on the device, 1 shared with its other outputs" in lines_of(await ask_report(source, "a"))


@each_row(NotFoundError("no executor"), UnavailableError("not attached"))
async def test_an_executor_that_is_lost_meanwhile_costs_only_the_sharing(error: Exception) -> None:
    class Lost(Scripted):
        async def get_block_map(self, executor: str) -> pb.GetBlockMapResponse:
            raise error

    source = Lost(live=[running("a", sequences=[admin_pb2.SequenceState(block_table=[0, 1])])])
    report = await ask_report(source, "a")
    assert report.sharing is None
    assert "blocks    2 on the device" in lines_of(report)


def test_a_swapped_request_has_its_blocks_in_the_host_pool() -> None:
    swapped = admin_pb2.SequenceState(block_table=[-1, -1], host_block_table=[5, 6])
    request = running("a", status_text="swapped", sequences=[swapped], num_losses=2)
    explanation = pb.ExplainRequestResponse(
        status=admin_pb2.REQUEST_STATUS_SWAPPED, explanation="swapped out", executor=EXECUTOR
    )
    lines = lines_of(Report(request, explanation))
    assert lines[0] == f"a   swapped on {EXECUTOR}"
    assert "blocks    2 in the host cache" in lines
    assert "trouble   executor lost 2 times since its last token" in lines
    assert not any(line.startswith("live page") for line in lines)


def test_a_life_has_times_and_the_spans_between() -> None:
    events = [
        event("ARRIVED", 0, "arrived with 100 prompt tokens"),
        event(
            "ADMITTED", 12_345, "admitted; of 100 tokens, 0 came from the prefix cache", executor=EXECUTOR, step_id=1234
        ),
        event("FIRST_TOKEN", 2_512_345, "first token"),
    ]
    lines = [line.plain for line in event_lines(events)]
    assert lines == [
        "    0.000 s                arrived with 100 prompt tokens",
        f"    0.012 s      +0.012 s  admitted; of 100 tokens, 0 came from the prefix cache  ({EXECUTOR}, step 1,234)",
        "    2.512 s      +2.500 s  first token",
    ]
    assert [line.plain for line in event_lines(events, num_known=2)] == lines[2:]


def test_an_ended_request_says_how_long_it_took() -> None:
    explanation = pb.ExplainRequestResponse(status=admin_pb2.REQUEST_STATUS_ENDED, explanation="ended 3.0 s ago; …")
    report = Report(ended("a", queue_ms=40, num_losses=1), explanation)
    assert report.has_ended
    assert "trouble   executor lost 1 time" in lines_of(report), "tokens may have come after it"
    assert "times     took 900 ms, queued for 40 ms" in lines_of(report)
    report.request.ended_at.FromJsonString("2026-11-21T23:59:58.750Z")
    assert "times     took 900 ms, queued for 40 ms, ended at 2026-11-21 23:59:58 UTC" in lines_of(report)


def test_a_beam_search_shows_its_width() -> None:
    search = admin_pb2.BeamSearchState(beam_width=4, hypotheses=[admin_pb2.HypothesisState(score=-1.5)])
    report = Report(
        running("a", beam_search=search), pb.ExplainRequestResponse(status=admin_pb2.REQUEST_STATUS_RUNNING)
    )
    assert "beams     width 4, complete hypotheses: 1" in lines_of(report)


# The command line --------------------------------------------------------------------------------


def test_without_a_request_it_says_where_ids_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 2
    expected = 'octavo: give a request id: the first column of "octavo top" lists them; see "octavo explain --help"\n'
    assert capsys.readouterr().err == expected


@each_row(["explain", "a"], ["top", "--once"], ["top", "--json"], ["top"])
def test_nobody_at_the_address_is_one_line_with_the_remedy(
    command: list[str], *, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", "127.0.0.1:1")
    assert run(command) == 1
    assert capsys.readouterr().err == 'octavo: no scheduler is reachable at 127.0.0.1:1; start one with "octavo up"\n'


@each_row(
    (["--address", "50052"], "'50052' is not HOST:PORT with a port from 1 to 65535"),
    (["--tls-cert", "x.pem"], "--tls-cert, --tls-key and --tls-server-name need --tls-ca or --tls"),
    (["--interval", "0"], "0.0 is not in the range"),
)
def test_a_wrong_flag_is_one_line(flags: list[str], sentence: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_token_does_not_travel_in_plaintext(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "a", "--address", "example.org:50052", "--token", "secret"]) == 1
    assert "the token would be sent to example.org:50052 in plaintext" in capsys.readouterr().err


@each_row(
    ("10.0.0.7:50052", 50055, "http://10.0.0.7:50055/"),
    ("[::1]:50052", 50055, "http://[::1]:50055/"),
    ("10.0.0.7:50052", 0, None),
    ("unix:/run/o.sock", 50055, None),
    ("dns:///a:1", 50055, None),
    ("ipv4:127.0.0.1:50052", 50055, None),
)
def test_the_live_page_is_where_a_browser_can_go(address: str, port: int, url: str | None) -> None:
    assert AdminClient(address).page_url(port) == url
