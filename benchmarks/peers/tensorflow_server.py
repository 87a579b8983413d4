"""TensorFlow's ParameterServerStrategy: asynchronous workers; writes down how many minibatches they get through.

A program that needs only TensorFlow: its argument is a JSON object with `model`, `workers`, `seconds`,
`rounds` and `output`. It is the coordinator, and starts one server for the parameters and one per worker.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roles import die_with_parent, start

WORKLOADS = {"small": ((64, 256, 10), 64), "mlp25m": ((1024, 4096, 4096, 1024), 8)}
"""Widths of the layers, and the size of a minibatch."""
LEARNING_RATE = 0.01
WARM_UP_SECONDS = 1.0
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GRPC_VERBOSITY": "NONE",
    "CUDA_VISIBLE_DEVICES": "-1",
    "OMP_NUM_THREADS": "1",
}


def tensorflow() -> Any:
    """Loaded only once the environment is set, which it reads while it is loaded."""
    os.environ.update(ENVIRONMENT)
    errors = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # While it is loaded, it heeds no log level.
    try:
        import tensorflow as tf
    finally:
        os.dup2(errors, 2)
        os.close(errors)
    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return tf


def serve(task: dict[str, Any]) -> None:
    if not die_with_parent(task):
        return
    tf = tensorflow()
    # A worker's step waits in one thread while a second works: with a single one it never ends.
    threads = 2 if task["job"] == "worker" else 1
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=threads)
    tf.distribute.Server(
        tf.train.ClusterSpec(task["cluster"]),
        job_name=task["job"],
        task_index=task["index"],
        protocol="grpc",
        config=config,
    ).join()


def addresses(count: int, held: contextlib.ExitStack) -> list[str]:
    """Free ones, which stay bound, without listening, so that nobody else is given them before the servers start."""
    found = []
    for _ in range(count):
        holder = held.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        found.append(f"127.0.0.1:{holder.getsockname()[1]}")
    return found


def training(tf: Any, strategy: Any, coordinator: Any, model: str) -> Callable[[int], float]:
    """What trains a number of minibatches, and returns how long that took."""
    widths, batch = WORKLOADS[model]
    with strategy.scope():
        layers = [
            (
                tf.Variable(tf.random.uniform((first, second), -(first**-0.5), first**-0.5)),
                tf.Variable(tf.zeros((second,))),
            )
            for first, second in itertools.pairwise(widths)
        ]
    parameters = list(itertools.chain.from_iterable(layers))

    def batches() -> Any:
        return tf.data.Dataset.from_tensors(tf.random.normal((batch, widths[0]))).cache().repeat()

    data = iter(coordinator.create_per_worker_dataset(batches))

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> None:
        x = next(iterator)
        with tf.GradientTape() as tape:
            for weight, bias in layers[:-1]:
                x = tf.nn.relu(tf.matmul(x, weight) + bias)
            weight, bias = layers[-1]
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) + bias))
        for parameter, gradient in zip(parameters, tape.gradient(loss, parameters), strict=True):
            # What the optimizers call: where the parameter is, so that only the gradient is sent.
            tf.raw_ops.ResourceApplyGradientDescent(var=parameter.handle, alpha=LEARNING_RATE, delta=gradient)

    def train(minibatches: int) -> float:
        start = time.perf_counter()
        for _ in range(minibatches):
            coordinator.schedule(step, args=(data,))
        coordinator.join()
        return time.perf_counter() - start

    return train


def measure(task: dict[str, Any], cluster: dict[str, list[str]]) -> list[float]:
    tf = tensorflow()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    train = training(tf, strategy, tf.distribute.coordinator.ClusterCoordinator(strategy), task["model"])
    workers = task["workers"]
    train(4 * workers)
    count, elapsed = 2 * workers, 0.0
    while elapsed < WARM_UP_SECONDS:
        count *= 2
        elapsed = train(count)
    rates = []
    for _ in range(task["rounds"]):
        count = max(workers, round(task["seconds"] * count / elapsed))
        elapsed = train(count)
        rates.append(count / elapsed)
        print(f"{task['model']}: {rates[-1]:.1f} minibatches/s", file=sys.stderr)
    return rates


def main() -> None:
    task = json.loads(sys.argv[1])
    if "job" in task:
        serve(task)
        return
    with contextlib.ExitStack() as stack:
        cluster = {"ps": addresses(1, stack), "worker": addresses(task["workers"], stack)}
        for job, index in [("ps", 0), *(("worker", index) for index in range(task["workers"]))]:
            start({"cluster": cluster, "job": job, "index": index}, stack)
        rates = measure(task, cluster)
        Path(task["output"]).write_text(json.dumps({"minibatches_per_second": rates}), encoding="utf-8")


if __name__ == "__main__":
    main()
