"""The process that meets the other nodes for the launcher of this one: `python -m samestep.launch.meeting`.

Commands come on stdin and events go to stdout, a line of JSON each. One thread reads commands, one follows the log in
the store (see nodes.py), and the main thread applies what they bring, adds to the log, and shows life: to the other
nodes by a number in the store, to the launcher by a line. It ends by itself when stdin does.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from samestep.launch.addresses import address_towards, interface_of, is_loopback
from samestep.launch.events import Event, Met, Node, Refused, to_line
from samestep.launch.nodes import ALL_DONE, MeetingSettings, Member, State, Watch, applied, missing, start_due
from samestep.launch.store import Connection, NoStoreError, connected

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["main"]

# Keys of workers don't begin with this.
_PREFIX = "samestep.meeting"
# After the launcher's death: time to say so to the others.
_ORPHAN_S = 2.0
_LOOK_S = 0.5
# What a busy machine may need beyond the interval at which life is shown.
_SLACK_S = 3.0


class _Over(Exception):  # noqa: N818 - not an error
    """The run that has met here is done; its store will be gone in a moment."""


class _Desk:
    """Where the launcher's commands and the log's entries arrive, and where events go out."""

    def __init__(self, settings: MeetingSettings) -> None:
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._patience_s = settings.keep_alive_interval_s * settings.keep_alive_max_attempt + _SLACK_S

    def read_commands(self) -> None:
        last: dict[str, Any] = {"do": "bye", "patience_s": _ORPHAN_S, "reason": "its launcher was killed"}
        for line in sys.stdin.buffer:
            command = json.loads(line)
            if command["do"] == "bye":
                last = command
                break
            self.inbox.put(("command", command))
        self.inbox.put(("command", last))
        threading.Event().wait(last["patience_s"] + _ORPHAN_S)  # the main thread may wait for the store, for ever
        os._exit(1)

    def say(self, event: Event) -> None:
        self._write(to_line(event))

    def alive(self) -> None:
        self._write(json.dumps({"patience_s": self._patience_s}))

    def pause(self, seconds: float) -> None:
        """Waits; ends the process if it is told to."""
        self.alive()
        try:
            kind, what = self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
        except queue.Empty:
            return
        if kind == "command" and what["do"] == "bye":
            os._exit(0)

    def wait_for_goodbye(self) -> None:
        while True:
            self.pause(_LOOK_S)

    def _write(self, line: str) -> None:
        try:
            print(line, flush=True)
        except BrokenPipeError:
            os._exit(1)


class _Participant:
    """This node among those that meet."""

    def __init__(self, settings: MeetingSettings, desk: _Desk, connection: Connection, deadline: float) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._settings = settings
        self._desk = desk
        self._connection = connection
        self._store = PrefixStore(_PREFIX, connection.store)
        self._state = State(uuid.uuid4().hex)
        self._index = 0
        self._num_written = 0
        self._watch = Watch(2 * settings.keep_alive_max_attempt)
        self._beat = 0
        self._next_beat = 0.0
        self._deadline = deadline  # of the gathering
        self._enough_since: float | None = None
        self._leaving: float | None = None
        self._later_store: TCPStore | None = None

    def join(self) -> None:
        """Takes a place in the log; raises _Over if that is the log of a run that is done."""
        s, addr = self._settings, self._connection.addr
        node = Node(socket.gethostname(), addr, interface_of(addr), s.nproc_per_node)
        me = Member(self._state.me, node, s.run_id, s.min_nodes, s.max_nodes, s.node_rank, self._connection.is_host)
        self._show_life()

        def entry(state: State) -> dict[str, Any]:
            if state.over == ALL_DONE:
                raise _Over
            return {"kind": "join", "member": asdict(me)}

        self._append(entry)
        threading.Thread(target=self._follow, args=(self._index,), daemon=True).start()

    def run(self) -> None:
        """Takes part until the launcher says goodbye."""
        while True:
            now = time.monotonic()
            if now >= self._next_beat:
                self._tick()
            self._decide(now)
            if self._leaving is not None and (now >= self._leaving or not self._must_stay()):
                os._exit(0)
            times = [self._next_beat, self._deadline if not self._state.running else None, self._leaving]
            if self._enough_since is not None:
                times.append(self._enough_since + self._settings.last_call_s)
            wake = min((t for t in times if t is not None and t > now), default=self._next_beat)
            try:
                kind, what = self._desk.inbox.get(timeout=max(0.0, wake - time.monotonic()))
            except queue.Empty:
                continue
            if kind == "command":
                self._obey(what)
            elif kind == "entry" and what[0] == self._index:
                self._apply(what[1])
            elif kind == "lost":
                raise what

    def who_held(self) -> str:
        """The node with the store, for a message."""
        held = [m.node for m in (*self._state.members, *self._state.roster) if m.holds_store]
        return f"{held[0].host} ({held[0].addr}), which held it," if held else "the machine that held it"

    @property
    def is_leaving(self) -> bool:
        return self._leaving is not None

    def _must_stay(self) -> bool:
        serves = self._connection.is_host or self._later_store is not None
        return serves and bool(self._state.others)

    def _obey(self, command: Mapping[str, Any]) -> None:
        uid, do = self._state.me, command["do"]
        if do == "bye":
            reason = command.get("reason", "its launcher has ended")
            self._leaving = time.monotonic() + command["patience_s"]
            self._append(lambda _: {"kind": "gone", "uid": uid, "reason": reason})
            return
        self._append(lambda _: {**{k: v for k, v in command.items() if k != "do"}, "kind": do, "uid": uid})

    def _tick(self) -> None:
        self._show_life()
        others = [m.uid for m in self._state.others]
        numbers = self._store.multi_get([f"beat/{uid}" for uid in others]) if others else []
        s = self._settings
        reason = f"it has shown no life for {s.keep_alive_interval_s * s.keep_alive_max_attempt:g} s"
        for uid in self._watch.look({u: n.decode() for u, n in zip(others, numbers, strict=True)}):
            self._append(
                lambda state, uid=uid: (  # type: ignore[misc]
                    {"kind": "gone", "uid": uid, "reason": reason} if uid in {m.uid for m in state.members} else None
                )
            )
        self._desk.alive()
        self._next_beat = time.monotonic() + s.keep_alive_interval_s / 2

    def _show_life(self) -> None:
        self._beat += 1
        self._store.set(f"beat/{self._state.me}", str(self._beat))

    def _decide(self, now: float) -> None:
        s, state = self._settings, self._state
        if state.running or state.over is not None or self._leaving is not None:
            self._enough_since = None
            return
        if len(state.waiting) < s.min_nodes:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        last_call_is_over = self._enough_since is not None and now >= self._enough_since + s.last_call_s
        if start_due(state, last_call_is_over):
            entry = {"kind": "start", "round": state.round, "store": self._store_for_workers()}
            self._append(lambda at: entry if start_due(at, last_call_is_over) and at.round == state.round else None)
        elif now >= self._deadline and state.me in {m.uid for m in state.members}:
            self._append(
                lambda at: (
                    None
                    if at.running or at.over is not None or at.round != state.round
                    else {"kind": "give up", "round": at.round, "message": missing(at, s, s.join_timeout_s)}
                )
            )

    def _store_for_workers(self) -> tuple[str, int]:
        """Where the workers of the next round meet: at the same port, where nothing is left of an earlier round."""
        store = self._connection.store
        if hasattr(store, "list_keys"):
            for key in store.list_keys():
                if not key.startswith(_PREFIX):
                    store.delete_key(key)
        elif self._state.round > 0:  # an older torch, which can't tell what to sweep away
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            addr = self._connection.addr
            self._later_store = TCPStore(addr, 0, is_master=True, wait_for_workers=False)
            return addr, self._later_store.port
        return "", self._settings.port  # each node has its own name for the endpoint

    def _append(self, entry: Callable[[State], dict[str, Any] | None]) -> None:
        """Adds to the log what `entry` makes of the state at the log's end, unless that is nothing."""
        while (made := entry(self._state)) is not None:
            text = json.dumps({**made, "by": self._state.me, "number": self._num_written})
            found = self._store.compare_set(f"log/{self._index}", "", text).decode()
            self._apply(found)
            if found == text:
                self._num_written += 1
                return

    def _apply(self, text: str) -> None:
        before = self._state
        self._state, events = applied(before, json.loads(text))
        self._index += 1
        if self._state.round != before.round:
            self._deadline = time.monotonic() + self._settings.join_timeout_s
        for event in events if self._leaving is None else ():
            self._desk.say(self._made_mine(event) if isinstance(event, Met) else event)

    def _made_mine(self, met: Met) -> Met:
        """Puts in the store's address as this node knows it, and its own as the others can reach it."""
        met = replace(met, store_addr=met.store_addr or self._settings.endpoint)
        mine = met.nodes[met.node_rank]
        afar = [node.addr for node in met.nodes if not is_loopback(node.addr)]
        if is_loopback(mine.addr) and afar and (addr := address_towards(afar[0])) is not None:
            mine = replace(mine, addr=addr, interface=interface_of(addr))
        return replace(met, nodes=(*met.nodes[: met.node_rank], mine, *met.nodes[met.node_rank + 1 :]))

    def _follow(self, index: int) -> None:
        """Reads the log as it grows; runs in a thread of its own, over a connection of its own."""
        from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]

        store = PrefixStore(_PREFIX, self._connection.follower)
        wait = timedelta(seconds=self._settings.keep_alive_interval_s)
        while True:
            try:
                store.wait([f"log/{index}"], wait)
                text = store.get(f"log/{index}").decode()
            except DistStoreError:  # nothing new
                continue
            except RuntimeError as e:
                self._desk.inbox.put(("lost", e))
                return
            self._desk.inbox.put(("entry", (index, text)))
            index += 1


def main() -> None:
    """Be the process: the first line on stdin has the settings."""
    # Told to all processes of a job at once, these are for the launcher, which then closes stdin.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    settings = MeetingSettings(**json.loads(sys.stdin.buffer.readline()))
    _name_process()
    desk = _Desk(settings)
    threading.Thread(target=desk.read_commands, daemon=True).start()
    import torch.distributed  # noqa: F401 - before life is shown, as this takes a while

    deadline = time.monotonic() + settings.join_timeout_s
    while True:
        try:
            connection = connected(settings, desk.pause, deadline)
        except NoStoreError as e:
            desk.say(Refused(str(e)))
            desk.wait_for_goodbye()
            return
        participant = _Participant(settings, desk, connection, deadline)
        try:
            participant.join()
            participant.run()
        except _Over:
            del participant, connection
            desk.pause(_LOOK_S)
            if time.monotonic() >= deadline:
                desk.say(
                    Refused(f"the run {settings.run_id!r} that met at {settings.place} is done; give another port")
                )
                desk.wait_for_goodbye()
        except RuntimeError as e:  # torch's, of any connection
            if participant.is_leaving:
                os._exit(0)
            desk.say(
                Refused(
                    f"the store at {settings.place}, where the nodes meet, is gone: {participant.who_held()} has ended"
                    f" or can't be reached ({str(e).partition(chr(10))[0]})"
                )
            )
            desk.wait_for_goodbye()


def _name_process() -> None:
    """Lets people who look at `ps` know what this is."""
    if sys.platform == "linux":
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write("samestep-meet")


if __name__ == "__main__":
    main()
