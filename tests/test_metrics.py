import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgo.metrics import average_accuracy, backward_transfer, forgetting, learning_accuracy

METRICS = [average_accuracy, backward_transfer, forgetting, learning_accuracy]

R = [
    [95.0],
    [90.0, 96.0],
    [92.0, 88.0, 97.0],
    [80.0, 90.0, 93.0, 94.0],
]

matrices = st.integers(1, 6).flatmap(
    lambda T: st.tuples(*(st.lists(st.floats(0, 100), min_size=k, max_size=k) for k in range(1, T + 1)))
)


def test_each_metric_by_hand():
    assert average_accuracy(R) == (80 + 90 + 93 + 94) / 4
    assert backward_transfer(R) == ((80 - 95) + (90 - 96) + (93 - 97)) / 3
    assert forgetting(R) == ((95 - 80) + (96 - 90) + (97 - 93)) / 3
    assert learning_accuracy(R) == (95 + 96 + 97 + 94) / 4


def test_forgetting_counts_from_the_best_and_backward_transfer_from_the_first():
    recovered = [[90.0], [95.0, 80.0], [93.0, 80.0, 70.0]]
    assert backward_transfer(recovered) == (3 + 0) / 2
    assert forgetting(recovered) == (2 + 0) / 2


def test_forgetting_does_not_take_the_last_row_for_the_best():
    # Task 1 is best at the very end: the maximum is over the rows before, so its forgetting is negative.
    assert forgetting([[90.0], [95.0, 80.0]]) == -5.0


def test_one_task_has_neither_transfer_nor_forgetting():
    assert backward_transfer([[90.0]]) == forgetting([[90.0]]) == 0.0
    assert average_accuracy([[90.0]]) == learning_accuracy([[90.0]]) == 90.0


@given(matrices)
def test_acc_is_learning_accuracy_plus_the_share_of_backward_transfer(R):
    T = len(R)
    assert math.isclose(average_accuracy(R), learning_accuracy(R) + (T - 1) / T * backward_transfer(R), abs_tol=1e-9)


@given(matrices)
def test_forgetting_is_never_less_than_the_loss_since_learning(R):
    assert forgetting(R) >= -backward_transfer(R) - 1e-9


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([], "empty: give one row per task"),
        ([[1.0], [1.0]], "row 2 of the accuracy matrix has 1 numbers: give 2, the accuracies of tasks 1..2"),
        ([[1.0, 0.0], [1.0, 1.0]], "row 1 of the accuracy matrix has 2 numbers: give 1"),
        ([[1.0], [1.0, math.nan]], r"R\[2, 2\] is nan"),
        ([[math.inf]], r"R\[1, 1\] is inf"),
    ],
)
def test_a_malformed_matrix_is_refused(metric, matrix, message):
    with pytest.raises(ValueError, match=message):
        metric(matrix)
