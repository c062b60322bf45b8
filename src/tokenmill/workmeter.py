"""What one server has worked, through all its lives, and the fastest it has been: core/occupancy by the clock."""

import time

from tokenmill.attempt import Lane
from tokenmill.clocks import LOOK_S
from tokenmill.core.occupancy import Slots, Work
from tokenmill.core.peak import Peak


class WorkMeter:
    """`stretch_s`: how long a server must have been full before its speed counts; 0: nothing is measured.

    `peak` is of the present life once that has shown one, of the last one until then, or what an earlier tokenmill
    saw of it.
    """

    def __init__(self, stretch_s: float, peak: Peak | None = None) -> None:
        self.peak = peak
        self._stretch_s = stretch_s
        self._before = Work()
        self._slots: Slots | None = None
        self._began = self._looked = time.monotonic()

    def opens(self, width: int, *, adopted: bool) -> Slots:
        """A life takes prompts, `width` at once; one that was adopted has shown its peak before."""
        if self.peak is not None and self.peak.width != width:
            self.peak = None
        self._slots = Slots(time.monotonic(), self._stretch_s, self.peak if adopted else None)
        return self._slots

    def closes(self) -> None:
        """It takes no more, and what it had in flight is lost."""
        if self._slots is not None:
            self._slots.close()
            self._before = self._before.plus(self._slots.work)
            self._slots = None

    def look(self, lane: Lane | None) -> bool:
        """To be called every LOOK_S; whether its peak is a new one."""
        moment = time.monotonic()
        late, self._looked = max(moment - self._looked - LOOK_S, 0.0), moment
        if lane is None or self._slots is None:
            return False
        lane.until_now()
        self._slots.look(late, LOOK_S)
        found = self._slots.stretches.peak if self._slots.stretches is not None else None
        if found is None or found == self.peak:
            return False
        self.peak = found
        return True

    @property
    def work(self) -> Work | None:
        """Until the last look; what is no life's was spent without serving. None where nothing is measured."""
        if not self._stretch_s:
            return None
        work = self._before if self._slots is None else self._before.plus(self._slots.work)
        return work.plus(Work(away=max(self._looked - self._began - work.seconds, 0.0)))
