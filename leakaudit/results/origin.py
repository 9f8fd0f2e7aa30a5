"""What is known when a run begins: policy, code, base model and data."""

from __future__ import annotations

from leakaudit.results.schema import Results, ResultsModel, TakenPolicy, TrackerRun


class Origin(ResultsModel):
    """The beginning of a run, taken once.

    A resumed audit keeps the first one.
    """

    policy: TakenPolicy | None = None
    of_training: bool = False
    """Whether it was taken before a training, so that what the training made is younger."""
    code_commit: str | None = None
    """Commit of the code in the working folder; None where git cannot say it."""
    code_dirty: bool | None = None
    """Whether that folder had changes that are not committed."""
    base_model: str = ""
    """`sha256:` and a digest of the base weights, or `hub:NAME@REVISION`; empty if neither could be had."""
    data: str = ""
    """Name of the data set, as its owner calls it; empty without one."""
    data_invented: bool = False
    """Whether its owner says that all texts were invented."""
    trackers: tuple[TrackerRun, ...] = ()
    """Runs of the training's trackers."""

    def within(self, results: Results) -> Results:
        """Return results that say where they come from."""
        about = self.model_dump(include={"code_commit", "code_dirty", "base_model", "data", "data_invented"})
        return results.model_copy(
            update={
                "run": results.run.model_copy(update={"policy": self.policy, "trackers": self.trackers}),
                "subject": results.subject.model_copy(update=about),
            }
        )
