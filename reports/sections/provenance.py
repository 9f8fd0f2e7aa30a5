"""The section on where the results come from."""

from __future__ import annotations

from leakaudit.gate.verdict import Verdict
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import MOST_ROWS, Section
from leakaudit.reports.wording import baseline_in_words, date_and_time, short_digest
from leakaudit.results.privacy import shipped_in_words
from leakaudit.results.schema import TrackerRun, Verification, VerificationStatus
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section:
    """Name run, tool, policy, model and regime, and the stamp of every step."""
    results, verdict = redacted.results, redacted.verdict
    run, subject, regime = results.run, results.subject, results.regime
    commit = subject.code_commit or "not recorded"
    dirty = {True: ", with uncommitted changes", False: ", clean", None: ""}[subject.code_dirty]
    frozen = "all parameters trained" if regime.trainable == "all" else regime.trainable
    mode = "training mode" if regime.training_mode else "evaluation mode"
    clip = f", gradients clipped at {regime.max_grad_norm:g}" if regime.max_grad_norm is not None else ""
    batch = f"batch {regime.batch_size}" if regime.batch_size is not None else "batch size not recorded"
    hidden = f", hidden size {regime.hidden}" if regime.hidden is not None else ""
    tokens = f", at most {regime.tokens} tokens a step" if regime.tokens else ""
    trained = [f"word embeddings {regime.embeddings}"] if regime.embeddings else []
    trained += [f"head {regime.head}" + (" to them" if regime.head == "tied" else "")] if regime.head else []
    trained += [f"adapters of rank {regime.adapters_rank}"] if regime.adapters_rank is not None else []
    environment = ", ".join(f"{key} {value}" for key, value in run.environment.items()) or "not recorded"
    left, given = redacted.hidden_environment, len(verdict.about.compared)
    pairs = [
        ("Run", f"{run.id}, {date_and_time(run.started)} to {date_and_time(run.finished)}"),
        ("Judged", date_and_time(verdict.evaluated_at)),
        ("Tool", f"leakaudit {run.tool}"),
        ("Command", run.command or "not recorded"),
        *([("Tracker", "; ".join(map(_tracker, run.trackers)))] if run.trackers else []),
        ("Seed", str(run.seed)),
        ("results.json", f"sha256:{verdict.results_sha256}" if verdict.results_sha256 else "digest not recorded"),
        ("Content", verdict.results_digest or "no digest"),
        ("Policy", f"{verdict.policy}, {verdict.policy_digest}"),
        *([("Baseline", baseline_in_words(verdict.baseline))] if verdict.baseline else []),
        ("Policy of the run", _policy_of_run(verdict)),
        *(
            [("Policy read from", f"{verdict.policy_ref}, commit {verdict.policy_commit}")]
            if verdict.policy_ref
            else []
        ),
        ("Battery", f"{run.battery.name} {run.battery.version}, {run.battery.digest}"),
        ("Model", f"{subject.model}, {subject.parameters} parameters, configuration {subject.config_digest}"),
        ("Base model", subject.base_model or "not recorded"),
        ("Data", subject.data or "no name given"),
        ("Artefacts", ", ".join(f"sha256:{one.sha256}" for one in verdict.about.artifacts) or "none named"),
        *([("Compared", f"{counted(given, 'file is', 'files are')} among them")] if given else []),
        ("Code", commit + dirty),
        ("Regime", f"{regime.dtype}, {mode}, dropout {regime.dropout:g}{hidden}, {frozen}"),
        *([("Trained parts", ", ".join(trained))] if trained else []),
        *([("Update", regime.update)] if regime.update else []),
        ("Batch", f"{batch}{tokens}, accumulation {regime.accumulation}{clip}"),
        ("Differential privacy", shipped_in_words(results)),
        ("Environment", environment + (f" ({counted(left, 'entry', 'entries')} not shown)" if left else "")),
    ]
    stamps = [
        {
            "id": step.id,
            "verification": _stamp(step.verification),
            "error": f"{step.verification.relative_error:.1e}"
            if step.verification.relative_error is not None
            else "not measured",
            "sequences": step.n_sequences,
            "tokens": step.n_tokens_bucket,
            "snapshot": short_digest(step.snapshot),
        }
        for step in results.steps
    ]
    return Section("provenance", "Provenance", {"provenance": pairs, "stamps": stamps[:MOST_ROWS]})


def _policy_of_run(verdict: Verdict) -> str:
    """Say with which policy the run began."""
    if not verdict.policy_of_run:
        return "not recorded"
    return verdict.policy_of_run + (", which is another one" if verdict.policy_changed else ", the same")


def _tracker(run: TrackerRun) -> str:
    """Say where the run is tracked.

    A name is left unless the mode of the text is full.
    """
    named = [part for part in (run.name, run.id if run.id != run.name else "", run.url) if part]
    return f"{run.kind}, {', '.join(named)}" if named else f"{run.kind}, run not named here"


def _stamp(found: Verification) -> str:
    """Return the stamp of a step, such as `noised(0.00025): as declared`."""
    value = {VerificationStatus.SCALED: found.scale, VerificationStatus.NOISED: found.sigma}.get(found.status)
    stamp = found.status.value if value is None else f"{found.status.value}({value:.4g})"
    return f"{stamp}: {found.note}" if found.note else stamp
