"""What is read off the accuracy matrix R.

R is a list of rows; row k (counted from 1) holds the accuracies of the tasks 1..k after task k was learned,
so it has k numbers. R[k, j] below is the accuracy of task j after task k, T the number of tasks. The unit
(percent or fraction) is that of R.
"""

import math
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def average_accuracy(R: Matrix) -> float:
    """ACC = 1/T sum_j R[T, j]: the mean accuracy over all tasks after the last one.

    >>> average_accuracy([[90.0], [80.0, 92.0]])
    86.0
    """
    _check(R)
    return math.fsum(R[-1]) / len(R)


def backward_transfer(R: Matrix) -> float:
    """BWT = 1/(T-1) sum_{k<T} (R[T, k] - R[k, k]): the paper's; negative is forgetting, 0 for one task.

    >>> backward_transfer([[90.0], [80.0, 92.0]])
    -10.0
    """
    _check(R)
    changes = [R[-1][k] - R[k][k] for k in range(len(R) - 1)]
    return math.fsum(changes) / max(len(changes), 1)


def forgetting(R: Matrix) -> float:
    """1/(T-1) sum_{k<T} (max_{k<=j<T} R[j, k] - R[T, k]): the fall from the best ever, 0 for one task.

    >>> forgetting([[90.0], [91.0, 92.0], [85.0, 92.0, 93.0]])
    3.0
    """
    _check(R)
    last = len(R) - 1
    falls = [max(row[k] for row in R[k:last]) - R[last][k] for k in range(last)]
    return math.fsum(falls) / max(len(falls), 1)


def learning_accuracy(R: Matrix) -> float:
    """1/T sum_k R[k, k]: the mean accuracy of each task right after it was learned.

    >>> learning_accuracy([[90.0], [80.0, 92.0]])
    91.0
    """
    _check(R)
    return math.fsum(row[-1] for row in R) / len(R)


def _check(R: Matrix) -> None:
    if not R:
        raise ValueError("the accuracy matrix is empty: give one row per task learned")
    for k, row in enumerate(R, start=1):
        if len(row) != k:
            raise ValueError(
                f"row {k} of the accuracy matrix has {len(row)} numbers: give {k}, the accuracies of "
                f"tasks 1..{k} after task {k}"
            )
        for j, accuracy in enumerate(row, start=1):
            if not math.isfinite(accuracy):
                raise ValueError(f"R[{k}, {j}] is {accuracy}: an accuracy is a finite number")
