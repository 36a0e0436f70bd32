"""On CUDA a step never waits for the host, so it can be captured in a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cudnn.allow_tf32 = False


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=4, padding_mode="circular", padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 9, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def data(task: int, n: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(n, 3, 16, 16, generator=generator), torch.randint(10, (n,), generator=generator)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(steps):
        optimizer.zero_grad(set_to_none=False)
        part = slice(i * 10 % len(x), i * 10 % len(x) + 10)
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def learned(model: nn.Module, device: str, **options: object) -> rgo.RGO:
    learner = rgo.RGO(model, **options)  # type: ignore[arg-type]
    learner.begin_task(0)
    x, y = (t.to(device) for t in data(0))
    train(model, x, y, 5)
    learner.end_task([(x, y)])
    return learner


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("options", [{}, {"tolerance": 0.05}, {"dtype": torch.bfloat16}, {"encode": False}])
def test_a_step_does_not_wait_for_the_host(options: dict[str, object]) -> None:
    model = convnet().cuda()
    learner = learned(model, "cuda", **options)
    learner.begin_task(1)
    x, y = (t.cuda() for t in data(1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, x, y, 3)  # the first step of the task included: the guard compares identities
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert learner.summary().covered[-2].path == "rows"


def test_a_captured_step_trains_as_the_eager_one_does() -> None:
    eager, captured = convnet().cuda(), convnet().cuda()
    x, y = (t.cuda() for t in data(1))
    for model in (eager, captured):
        learned(model, "cuda").begin_task(1)
    optimizer = torch.optim.SGD(captured.parameters(), lr=0.05)
    batch, label = x[:10].clone(), y[:10].clone()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(captured(batch), label).backward()
        optimizer.step()

    train(eager, x, y, 3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            batch.copy_(x[i * 10 : i * 10 + 10])
            label.copy_(y[i * 10 : i * 10 + 10])
            step()
    torch.cuda.current_stream().wait_stream(side)
    for a, b in zip(eager.parameters(), captured.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(3, 20):
        batch.copy_(x[i * 10 : i * 10 + 10])
        label.copy_(y[i * 10 : i * 10 + 10])
        graph.replay()
    optimizer_eager = torch.optim.SGD(eager.parameters(), lr=0.05)
    for i in range(3, 20):
        optimizer_eager.zero_grad()
        F.cross_entropy(eager(x[i * 10 : i * 10 + 10]), y[i * 10 : i * 10 + 10]).backward()
        optimizer_eager.step()
    for a, b in zip(eager.parameters(), captured.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_first_step_of_a_task_may_itself_be_captured() -> None:
    model = convnet().cuda()
    learner = learned(model, "cuda")
    x, y = (t[:10].cuda() for t in data(1))
    train(model.requires_grad_(), x, y, 0)
    learner.begin_task(1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        F.cross_entropy(model(x), y).backward()
    graph.replay()
    torch.cuda.synchronize()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert any(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p, old)


def test_P_on_the_gpu_is_P_on_the_cpu() -> None:
    on_cpu, on_gpu = convnet(), convnet().cuda()
    cpu, gpu = (rgo.RGO(m) for m in (on_cpu, on_gpu))
    x, y = data(0)
    for learner in (cpu, gpu):
        learner.begin_task(0)
        learner.end_task([(x, y)])  # batches on the CPU in both cases
    for name, p in cpu.projections.items():
        other = gpu.projections[name]
        assert other.P.is_cuda
        torch.testing.assert_close(other.P.cpu(), p.P, rtol=1e-3, atol=1e-5)
        assert other.c == pytest.approx(p.c, rel=1e-4)


def test_a_model_moved_to_the_gpu_between_and_inside_tasks_goes_on() -> None:
    model = convnet()
    learner = learned(model, "cpu")
    model.cuda()
    learner.begin_task(1)
    x, y = data(1)
    train(model, x.cuda(), y.cuda(), 3)
    model.cpu()
    train(model, x, y, 3)
    model.cuda()
    learner.end_task([(x, y)])
    with learner.task(0), torch.no_grad():
        assert torch.isfinite(model(x.cuda())).all()


def test_a_step_is_deterministic() -> None:
    results = []
    for _ in range(2):
        model = convnet().cuda()
        learned(model, "cuda").begin_task(1)
        x = data(1)[0].cuda()
        torch.use_deterministic_algorithms(True)
        try:
            h = model[:8](x[:10])
            results.append(torch.autograd.grad(model[8:](h).sum(), h)[0])
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(*results)
