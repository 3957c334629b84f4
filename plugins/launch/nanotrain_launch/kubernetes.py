"""A Job of Kubernetes and the headless Service by which its pods find the first: ``kubectl apply -f FILE``.

An Indexed Job of ``batch/v1``, which needs no operator: one pod per node, one launcher per pod.
``podFailurePolicy`` uses the exit codes of docs/reliability.md: preempted pods are restarted and not counted,
crashes and hangs are counted (``backoffLimit``), and failures that would recur fail the Job. Requires
Kubernetes 1.31.

Source: kubernetes.io/docs/concepts/workloads/controllers/job.
"""

from __future__ import annotations

from typing import Any

import yaml

from nanotrain_core.api import Exit
from nanotrain_launch.job import PORT, Job, text
from nanotrain_launch.options import COMMAND, NAME, PORT_NUMBER, QUANTITY, WORD, Option, command_words

OPTIONS = {
    "image": Option("a container image with nanotrain", WORD, "registry.example/nanotrain:1", required=True),
    "pvc": Option(
        "a PersistentVolumeClaim that all pods share, for recipe, data and runs",
        NAME,
        "training",
        required=True,
    ),
    "namespace": Option("a namespace", NAME, default="default"),
    "workdir": Option(
        "where the claim is mounted: recipe and runs lie there", r"/[\w./-]+", default="/workspace"
    ),
    "cpu": Option("cores of a pod", r"[1-9]\d*m?", "64"),
    "memory": Option("memory of a pod", QUANTITY, "500Gi"),
    "shm": Option("size of /dev/shm, which counts as the pod's memory", QUANTITY, default="16Gi"),
    "gpu": Option("the name of the GPU resource", r"[\w.-]+/[\w.-]+", default="nvidia.com/gpu"),
    "service-account": Option("a service account", NAME),
    "priority": Option("a priority class", NAME),
    "requeues": Option(
        "how often a crash or a hang of the run is followed by another attempt", r"\d+", default="3"
    ),
    "port": Option("the port where pods meet, from 1 to 65535", PORT_NUMBER, default=str(PORT)),
    "domain": Option("the cluster's domain", NAME, default="cluster.local"),
    "command": Option("how pods call nanotrain", COMMAND, "/opt/venv/bin/nanotrain", default="nanotrain"),
}

#: Exit codes of failures that would recur after a restart.
FINAL = sorted((Exit.USER, Exit.DIVERGED, Exit.LOCKED, Exit.CORRUPTED, Exit.UNSAVED, Exit.INTERRUPTED))
CONTAINER = "nanotrain"


def script(job: Job, options: dict[str, str]) -> str:
    """Return the documents: the Service first."""
    documents = [service(job, options), indexed_job(job, options)]
    lines = job.header(f"kubectl apply -f FILE; kubectl -n {options['namespace']} logs -f job/{job.label()}")
    written: str = yaml.safe_dump_all(documents, sort_keys=False, width=110)
    return f"{text(lines)}---\n{written}"


def service(job: Job, options: dict[str, str]) -> dict[str, Any]:
    """Return the headless Service. It publishes names of pods that are not ready: they need one another."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(job),
            "ports": [{"name": "rendezvous", "port": int(options["port"])}],
        },
    }


def indexed_job(job: Job, options: dict[str, str]) -> dict[str, Any]:
    """Return the Job."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        _rule("Ignore", [Exit.PREEMPTED]),
        _rule("FailJob", FINAL),
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, options),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            # If an attempt crashes, all of its pods end, and each counts as a failure; so does a pod that was
            # restarted before the others had noticed.
            "backoffLimit": 2 * int(options["requeues"]) * job.nodes,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job, options)},
        },
    }


def _pod(job: Job, options: dict[str, str]) -> dict[str, Any]:
    resources: dict[str, str | int] = {key: options[key] for key in ("cpu", "memory") if key in options}
    if job.gpus:
        resources[options["gpu"]] = job.nproc
    # The name in the first pod's /etc/hosts: that pod can resolve it before the cluster's DNS can.
    name, domain = job.label(), f"{options['namespace']}.svc.{options['domain']}"
    endpoint = f"{name}-0.{name}.{domain}:{options['port']}"
    nanotrain = command_words(options["command"])
    words = job.on_each_node(nanotrain, "--rdzv-endpoint", endpoint, "--rdzv-id", name)
    container = {
        "name": CONTAINER,
        "image": options["image"],
        # No shell between: SIGTERM reaches the launcher.
        "command": nanotrain,
        "args": [_literal(word) for word in words[len(nanotrain) :]],
        "workingDir": options["workdir"],
        "env": [{"name": key, "value": _literal(value)} for key, value in job.environment.items()],
        "resources": {"limits": resources, "requests": dict(resources)},
        "volumeMounts": [
            {"name": "workspace", "mountPath": options["workdir"]},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod: dict[str, Any] = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_until_killed,
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": options["pvc"]}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options["shm"]}},
        ],
    }
    if "service-account" in options:
        pod["serviceAccountName"] = options["service-account"]
    if "priority" in options:
        pod["priorityClassName"] = options["priority"]
    return pod


def _metadata(job: Job, options: dict[str, str]) -> dict[str, Any]:
    return {"name": job.label(), "namespace": options["namespace"], "labels": _labels(job)}


def _labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "nanotrain", "app.kubernetes.io/instance": job.label()}


def _rule(action: str, codes: list[int]) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes}}


def _literal(word: str) -> str:
    """Return a word in which Kubernetes replaces no ``$(NAME)``."""
    return word.replace("$(", "$$(")
