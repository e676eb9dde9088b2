"""What a run contradicts of the profile and the cluster that its plan was made from.

A run measures three figures that add up to its step, and each tells one speed:

- computing (updates included): the device's. One factor holds for every unit, the update and what
  lossy exchanges choose.
- blocking communication and exposed exchange: the bandwidth of the links that most of each crosses,
  by predicted seconds. Where both cross links of the same level, their sum tells it.

The plan's own decisions are simulated with other speeds until each figure is the measured one. The
three are searched in turns, because computing hides communication and both may slow each other.
Latencies, overheads, interference and memory stay: one step does not tell them apart.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from ..cost.cost import CostModel
from ..cost.device_kinds import slowed
from ..cost.step_time import LINKS
from ..schema.cluster import LINK_NAMES, Cluster, LevelName
from ..schema.errors import InputError
from ..schema.plan import Plan, Prediction
from ..schema.profile import ModelProfile
from ..schema.record import Positive, Record
from ..schema.report import Figures, RunReport, predicted_figures
from ..schema.text import rate, seconds
from ..solve.evaluate import Evaluation, decisions_of, evaluation
from .what_if import with_rates

# A run whose step and its parts differ from the prediction by no more of the step agrees with it:
# predictions are not much nearer than that.
AGREES = 0.05
# Once something is corrected, so is every figure that differs by more than this share of the step.
CORRECTED = 0.02
# Nothing is taken to be so many times as slow or as fast as was said: then the run was of other
# things.
MOST = 100.0
# A median of fewer steps is decided by one disturbance.
LEAST_STEPS = 5
# How near a figure is brought to the measured one, as a share of the step, and how often the parts
# are searched in turns for that, each in at most so many steps.
NEAR = 1e-3
ROUNDS, SEARCHED = 12, 40

Part = Literal["compute", "intra", "inter"]
FigureName = Literal["compute_s", "blocking_s", "exposed_s"]
WAITS: dict[FigureName, str] = {
    "blocking_s": "inside forward and backward",
    "exposed_s": "for gradients",
}


class Change(Record, frozen=True, kw_only=True):
    """One correction: computing, or moving bytes over the links of a level, takes ``times`` as long
    as was assumed."""

    part: Part
    times: Positive
    sentence: str


class Calibration(Record, frozen=True, kw_only=True):
    """The plan's step as ``predicted`` from what it was made from, as ``measured`` and as
    ``calibrated``: predicted from the corrected ``profile`` and ``cluster``, which are as they were
    where there are no ``changes``. ``remarks`` say what the run does not tell."""

    predicted: Figures
    measured: Figures
    calibrated: Figures
    changes: tuple[Change, ...]
    remarks: tuple[str, ...]
    profile: ModelProfile
    cluster: Cluster


def calibrate(
    plan: Plan, report: RunReport, profile: ModelProfile, cluster: Cluster
) -> Calibration:
    """See ``api.calibrate``."""
    measured = _measured(plan, report)
    _check_made_from(plan, profile, cluster)
    run = _Run(plan, profile, cluster, measured)
    before = run.predicted(AS_ASSUMED)
    if abs(before.step_s / plan.prediction.step_s - 1) > CORRECTED:
        raise InputError(
            f"from this profile and cluster the plan's step is predicted to take "
            f"{seconds(before.step_s)}, and the plan says {seconds(plan.prediction.step_s)}: name "
            "what it was made from (--profile and --cluster, profile and cluster), or plan, launch "
            "and calibrate anew"
        )
    apart = [abs(_total(before, (name,)) - measured[name]) for name in measured]
    apart.append(abs(before.step_s - run.step_s))
    times = run.fitted() if max(apart) > AGREES * run.step_s else AS_ASSUMED
    made = run.corrected(times, f"a run of {report.target} on {report.world_size} ranks")
    after = run.predicted(times)
    return Calibration(
        predicted=predicted_figures(before),
        measured=report.measured,
        calibrated=predicted_figures(after),
        changes=made.changes,
        remarks=run.remarks(times),
        profile=made.profile,
        cluster=made.cluster,
    )


# -- what is refused ------------------------------------------------------------------------------


def check_result_of(plan: Plan, report: RunReport) -> None:
    """Raises ``InputError`` where a run's report is of another plan."""
    for what, theirs, ours in (
        ("model", report.target, plan.target),
        ("number of ranks", report.world_size, plan.world_size),
        ("prediction", report.predicted, predicted_figures(plan.prediction)),
    ):
        if theirs != ours:
            shown = [seconds(v.step_s) if isinstance(v, Figures) else v for v in (theirs, ours)]
            raise InputError(
                f"the report is of another plan, its {what} is {shown[0]} and the plan's "
                f"{shown[1]}: give the plan that was launched, and its own report "
                "(--report, or what mw.launch returned)"
            )


def _measured(plan: Plan, report: RunReport) -> dict[FigureName, float]:
    """The seconds that the report tells, checked."""
    check_result_of(plan, report)
    if report.background is not None:
        raise InputError(
            "the report is of a run with a background job, which lengthens steps: launch the plan "
            "without --background (background)"
        )
    if report.steps < LEAST_STEPS:
        raise InputError(
            f"the report has {report.steps} measured steps, which one disturbance may decide: "
            f"launch with --steps {LEAST_STEPS} or more (steps)"
        )
    figures = report.measured
    if figures.blocking_s is None or figures.exposed_s is None:
        raise InputError(
            "the report does not say how long ranks waited (blocking_s, exposed_s): launch the "
            "plan again with --report (mw.launch returns it)"
        )
    compute_s = figures.step_s - figures.blocking_s - figures.exposed_s
    if not compute_s > 0:
        raise InputError(
            f"the report has a step of {seconds(figures.step_s)} with waits of "
            f"{seconds(figures.blocking_s + figures.exposed_s)}, which leaves no time to compute: "
            "launch the plan again with --report (mw.launch returns it)"
        )
    if not plan.prediction.step_s > 0:
        raise InputError(
            "the plan predicts a step of 0 s, so its profile holds no times: profile the model, "
            "then plan and launch anew"
        )
    return {
        "compute_s": compute_s,
        "blocking_s": figures.blocking_s,
        "exposed_s": figures.exposed_s,
    }


def _check_made_from(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    if profile.model != plan.model or [u.name for u in profile.units] != [
        u.name for u in plan.units
    ]:
        raise InputError(
            f"the profile is of another model ({profile.target}) than the plan's ({plan.target}): "
            "name the one that it was made from with --profile (profile)"
        )
    if cluster.world_size != plan.world_size:
        raise InputError(
            f"the cluster has {cluster.world_size} devices and the plan is for {plan.world_size}: "
            "name the one that it was made for with --cluster (cluster)"
        )


# -- other speeds ---------------------------------------------------------------------------------


class MeasuredTimes(NamedTuple):
    """How many times as long each part takes as was assumed: computing, and moving bytes inside
    and between nodes."""

    compute: float = 1.0
    intra: float = 1.0
    inter: float = 1.0


AS_ASSUMED = MeasuredTimes()


class _Corrected(NamedTuple):
    profile: ModelProfile
    cluster: Cluster
    changes: tuple[Change, ...]


class _MeasuredPart(NamedTuple):
    """What a run tells of a part: the seconds measured, and those that it is fitted to, which are
    more where links may be any faster. ``unexplained`` where the links' latency alone
    (``latency_s``) takes more."""

    found_s: float
    least_s: float
    unexplained: bool = False
    latency_s: float = 0.0

    @property
    def open(self) -> bool:
        """Whether the links may be any faster than fitted."""
        return self.found_s < self.least_s


class _Run:
    """A plan's own decisions, predicted at other speeds than those it was made from, and the
    seconds that they were measured to take."""

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        cluster: Cluster,
        measured: Mapping[FigureName, float],
    ) -> None:
        self.plan, self.profile, self.cluster = plan, profile, cluster
        self.measured, self.step_s = measured, sum(measured.values())
        self.decisions = decisions_of(plan)
        self._known: dict[MeasuredTimes, Prediction] = {}
        assumed = self._evaluated(AS_ASSUMED)
        self._known[AS_ASSUMED] = assumed.prediction
        self.parts = _parts(assumed)

    def _evaluated(self, times: MeasuredTimes) -> Evaluation:
        model = CostModel.of_plan(self.plan, *self.documents(times))
        return evaluation(model, self.decisions, schedule=self.plan.schedule)

    def documents(self, times: MeasuredTimes) -> tuple[ModelProfile, Cluster]:
        """The profile and the cluster at those speeds."""
        cluster = _with_slower(self.cluster, "intra", times.intra)
        cluster = _with_slower(cluster, "inter", times.inter)
        # A run tells only that devices and hosts together take longer.
        return slowed(self.profile, times.compute, hosts=True), cluster

    def predicted(self, times: MeasuredTimes) -> Prediction:
        """The plan's step at those speeds."""
        if times not in self._known:
            self._known[times] = self._evaluated(times).prediction
        return self._known[times]

    def of(self, part: Part, times: MeasuredTimes) -> Callable[[float], float]:
        """The seconds by which ``part`` is told, as a function of its own entry in ``times``."""
        names = self.parts[part]
        return lambda x: _total(self.predicted(times._replace(**{part: x})), names)

    # -- the search ------------------------------------------------------------------------------

    def fitted(self) -> MeasuredTimes:
        """The speeds at which the plan's step comes out as measured; 1 for what agrees, and for
        links whose waits no bandwidth explains."""
        times = AS_ASSUMED
        for _ in range(ROUNDS):
            before = times
            for part in self.parts:
                times = times._replace(**{part: self._fitted_part(part, times)})
            if max(abs(a / b - 1) for a, b in zip(times, before, strict=True)) < NEAR:
                break
        return times

    def _fitted_part(self, part: Part, times: MeasuredTimes) -> float:
        took, told = self.of(part, times), self._told(part, times)
        target_s = told.least_s
        agrees = abs(took(1.0) - target_s) <= CORRECTED * self.step_s
        if agrees or told.unexplained:
            return 1.0
        if not took(1 / MOST) <= target_s <= took(MOST):
            raise InputError(self._inexplicable(part, target_s, took))
        return _solved(took, target_s, getattr(times, part), NEAR * self.step_s)

    def _inexplicable(self, part: Part, target_s: float, took: Callable[[float], float]) -> str:
        what = "computed" if part == "compute" else f"communicated {LINK_NAMES[part]}"
        fixed_s = took(1 / MOST)
        if part == "compute" and fixed_s > target_s:
            return (
                f"the run computed for {seconds(target_s)} of a step, and the executor's own work "
                f"alone is predicted to take {seconds(fixed_s)}, as the probe measured it: the "
                "machine was busy then, or is another one; probe, plan and launch anew"
            )
        return (
            f"the run {what} for {seconds(target_s)} of a step, and predicted are "
            f"{seconds(took(1.0))}, which no factor up to {MOST:g} explains: check that profile "
            "and cluster are of these devices and links, or measure them anew"
        )

    def _told(self, part: Part, times: MeasuredTimes) -> _MeasuredPart:
        found_s = sum(self.measured[name] for name in self.parts[part])
        if part == "compute":
            return _MeasuredPart(found_s, found_s)
        latency_s = self.of(part, times)(1 / MOST)
        # Waits that hardly show only say that links are fast enough: the slowest such are meant.
        least_s = max(found_s, latency_s + CORRECTED * self.step_s)
        return _MeasuredPart(
            found_s, least_s, latency_s - found_s > AGREES * self.step_s, latency_s
        )

    # -- what is said ----------------------------------------------------------------------------

    def corrected(self, times: MeasuredTimes, run: str) -> _Corrected:
        """Both documents at those speeds, which say what was corrected by ``run``."""
        profile, cluster = self.documents(times)
        changes = []
        for part in self.parts:
            by = getattr(times, part)
            if by == 1.0:
                continue
            faster = self._told(part, times).open
            sentence = f"{self._sentence(part, by, faster)}, by {run}"
            changes.append(Change(part=part, times=by, sentence=sentence))
            if part == "compute":
                said = (*profile.calibrated, sentence)
                profile = msgspec.structs.replace(profile, calibrated=said)
            else:
                said = (*cluster.calibrated, sentence)
                cluster = msgspec.structs.replace(cluster, calibrated=said)
        return _Corrected(profile, cluster, tuple(changes))

    def _sentence(self, part: Part, by: float, faster: bool) -> str:
        if part == "compute":
            if by < 1:
                return f"computing is {1 / by:.2f} times as fast as assumed"
            return f"computing takes {by:.2f} times as long as assumed"
        assumed, found = self._rate(part), self._rate(part) / by
        least = "at least " if faster else ""
        return f"links {LINK_NAMES[part]} carry {least}{rate(found)}, not {rate(assumed)}"

    def _rate(self, name: LevelName) -> float:
        level = self.cluster.level(name)
        assert level is not None, "the plan communicates over it"
        return level.bytes_per_s

    def remarks(self, times: MeasuredTimes) -> tuple[str, ...]:
        """What the run does not tell."""
        found: list[str] = []
        for name in LINKS:
            if name in self.parts and getattr(times, name) == 1.0:
                found += self._untold(name, times)
        several = {
            "inter": len(self.cluster.nodes) > 1,
            "intra": any(len(node.devices) > 1 for node in self.cluster.nodes),
        }
        found += [
            f"The run tells nothing of links {LINK_NAMES[name]}: what the plan communicates "
            "crosses others, or mostly does."
            for name in LINKS
            if several[name] and name not in self.parts
        ]
        told = {name for names in self.parts.values() for name in names}
        found += [
            f"Ranks waited {seconds(self.measured[name])} {where}, where the plan communicates "
            "nothing."
            for name, where in WAITS.items()
            if name not in told and self.measured[name] > AGREES * self.step_s
        ]
        return tuple(found)

    def _untold(self, name: LevelName, times: MeasuredTimes) -> list[str]:
        """What the run does not tell of links that are left as they were."""
        told, where = self._told(name, times), LINK_NAMES[name]
        if told.unexplained:
            return [
                f"Ranks waited {seconds(told.found_s)} for communication {where}, less than "
                f"predicted without any bytes to move ({seconds(told.latency_s)}, by latency): the "
                "links are left as they are; probe them anew."
            ]
        if not told.open:
            return []
        shows_s = told.least_s + CORRECTED * self.step_s
        slowest = _solved(self.of(name, times), shows_s, 1.0, NEAR * self.step_s)
        if slowest >= MOST:
            return []
        return [
            f"Hardly any communication {where} was waited for: links slower than "
            f"{rate(self._rate(name) / slowest)} would have shown, faster ones would not."
        ]


def _parts(assumed: Evaluation) -> dict[Part, tuple[FigureName, ...]]:
    """The figures that tell each part, in the order in which one needs those before."""
    chain, messages = assumed.chain, assumed.step.messages
    waited = chain.entry_forward_s + chain.entry_backward_s
    waited = (waited + chain.inner_forward_s + chain.inner_backward_s).sum(axis=1)
    sent = [sum(m.seconds for m in messages if m.link == link) for link in LINKS]
    found: dict[Part, tuple[FigureName, ...]] = {"compute": ("compute_s",)}
    on_links: dict[FigureName, list[float]] = {"blocking_s": waited.tolist(), "exposed_s": sent}
    for name, each in on_links.items():
        if any(each):
            level = LINKS[each.index(max(each))]
            found[level] = (*found.get(level, ()), name)
    return found


def _total(found: Prediction, names: tuple[FigureName, ...]) -> float:
    total: float = sum(getattr(found, name) for name in names)
    return total


def _with_slower(cluster: Cluster, name: LevelName, times: float) -> Cluster:
    """The cluster whose links of that level take so many times as long to move bytes."""
    return cluster if times == 1.0 else with_rates(cluster, name, lambda old: old / times)


def _solved(took: Callable[[float], float], target_s: float, start: float, near_s: float) -> float:
    """Where ``took``, which rises, is ``target_s``, from ``start`` on and from 1/MOST to MOST; the
    end of that range where it is beyond."""
    low = high = start
    below = above = took(start) - target_s
    if abs(below) <= near_s:
        return start
    factor = 1.2
    while below > 0 and low > 1 / MOST:
        high, above = low, below
        low, factor = max(low / factor, 1 / MOST), factor * factor
        below = took(low) - target_s
    while above < 0 and high < MOST:
        low, below = high, above
        high, factor = min(high * factor, MOST), factor * factor
        above = took(high) - target_s
    if below > 0 or above < 0:
        return low if below > 0 else high
    # False position, with the Illinois rule: between its bends the step is linear in what each part
    # takes. Where slices change their order it may jump over the target.
    last = 0
    for _ in range(SEARCHED):
        x = (low * above - high * below) / (above - below)
        here = took(x) - target_s
        if abs(here) <= near_s:
            return x
        if here < 0:
            low, below, above = x, here, above / 2 if last < 0 else above
        else:
            high, above, below = x, here, below / 2 if last > 0 else below
        last = -1 if here < 0 else 1
    return high
