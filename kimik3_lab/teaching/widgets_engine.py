"""Lesson 10: read a server's ``/metrics`` while it works, and draw what they say, live.

Needs httpx and prometheus_client; plotly for the figure, IPython for the live view only. The names
are vLLM's, so the same dashboard watches a vLLM server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx
import plotly.graph_objects as go
from prometheus_client.parser import text_string_to_metric_families

from kimik3_lab.teaching import plots_engine

__all__ = ["Dashboard", "Sample", "read_metrics"]

Result = TypeVar("Result")

#: What the dashboard keeps of all metrics: our name for it, and vLLM's.
WATCHED = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "cache_usage": "vllm:kv_cache_usage_perc",
    "output_tokens": "vllm:generation_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Sample:
    """One look at the metrics.

    Attributes
    ----------
    seconds
        Since the dashboard was made.
    running, waiting
        Requests with a seat, and without one.
    cache_usage
        Share of the cache's blocks in use, 0 to 1.
    output_tokens, drafts, accepted
        Counted since the server started: tokens generated, drafts verified, and draft tokens kept.
    """

    seconds: float
    running: float
    waiting: float
    cache_usage: float
    output_tokens: float
    drafts: float
    accepted: float


def read_metrics(base_url: str, *, timeout: float = 10.0) -> dict[str, float]:
    """Values of the metrics without labels of their own, by name.

    Parameters
    ----------
    base_url
        Address of the server, without ``/metrics``.
    timeout
        Seconds until a server that does not answer is given up.

    Raises
    ------
    httpx.HTTPError
        If there is no server, or it has no metrics.
    """
    answer = httpx.get(f"{base_url}/metrics", timeout=timeout)
    answer.raise_for_status()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if set(sample.labels) <= {"model_name", "engine"}
    }


class Dashboard:
    """Looks at a server's metrics while something runs against it.

    Parameters
    ----------
    base_url
        Address of the server.
    interval
        Seconds between two looks.

    Attributes
    ----------
    samples : list of Sample
        In order of time.

    Examples
    --------
    ::

        dashboard = Dashboard(server.base_url)
        answers = dashboard.follow(ask_many_things)
    """

    def __init__(self, base_url: str, *, interval: float = 0.25) -> None:
        self.base_url, self.interval = base_url, interval
        self.samples: list[Sample] = []
        self._began = time.monotonic()

    def look(self) -> Sample:
        """Take one sample."""
        values = read_metrics(self.base_url)
        found = {name: values.get(metric, 0.0) for name, metric in WATCHED.items()}
        sample = Sample(time.monotonic() - self._began, **found)
        self.samples.append(sample)
        return sample

    def follow(self, job: Callable[[], Result], *, live: bool = True) -> Result:
        """Run ``job`` in a thread and look on until it has ended; return what it returned.

        Parameters
        ----------
        job
            Called once, without arguments. What it raises is raised here.
        live
            Draw the figure anew after each look; False only samples.
        """
        outcome: list[Result] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(job())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self.look()
        thread.start()
        view = _LiveView() if live else None
        while thread.is_alive():
            thread.join(self.interval)
            self.look()
            if view is not None:
                view.show(self.figure())
        if failure:
            raise failure[0]
        return outcome[0]

    def figure(self) -> go.Figure:
        """Draw the samples so far."""
        return plots_engine.dashboard(self.samples)


class _LiveView:
    """One place in the output of a cell, drawn over again."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": "watching ..."}, raw=True, display_id=True)

    def show(self, figure: go.Figure) -> None:
        if self._handle is not None:  # None outside of IPython
            # As data: a figure that displays itself opens a new place each time.
            data = {"application/vnd.plotly.v1+json": json.loads(figure.to_json())}
            self._handle.update(data, raw=True)
