"""What the events of a stream bring, put together: the scheduler sends each token once."""

from dataclasses import replace

from octavo.outputs import Delta, Event, Finished, Output, PromptLogprobs, TokenLogprob


class StreamedAnswer:
    """Makes the last event complete, whose outputs come without what the deltas brought."""

    def __init__(self) -> None:
        self._deltas: dict[int, list[Delta]] = {}
        self._prompt: list[PromptLogprobs] = []

    def take(self, event: Event) -> Event:
        """Return an event as callers get it."""
        match event:
            case Delta():
                self._deltas.setdefault(event.output_index, []).append(event)
            case PromptLogprobs():
                self._prompt.append(event)
            case Finished():
                prompt_logprobs = None if event.prompt_logprobs is None else self._joined()
                return replace(
                    event, outputs=tuple(map(self._completed, event.outputs)), prompt_logprobs=prompt_logprobs
                )
        return event

    def _completed(self, output: Output) -> Output:
        deltas = self._deltas.get(output.output_index, [])
        token_ids: list[int] = []
        logprobs: list[float] = []
        alternatives: list[tuple[TokenLogprob, ...]] = []
        for delta in deltas:
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            alternatives += delta.alternatives
        return replace(
            output,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            alternatives=tuple(alternatives),
        )

    def _joined(self) -> PromptLogprobs:
        logprobs = tuple(logprob for part in self._prompt for logprob in part.logprobs)
        return PromptLogprobs(logprobs, tuple(place for part in self._prompt for place in part.alternatives))
