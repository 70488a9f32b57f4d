"""koila.integrations: a Trainer, Lightning and Accelerate train as they do without koila, in
slices."""

import pytest
import torch
from conftest import DEVICE
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import koila

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the loops choose their device themselves")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3)).double()


def data():
    torch.manual_seed(1)
    return torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 3, (60,))


def are_close(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=1e-9, atol=1e-12) for p, q in pairs)


# ---- Hugging Face


class Classifier(nn.Module):
    """As the models of transformers: computes its loss where it gets labels."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None, scale=None):
        logits = self.net(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def hugging_face(folder, callbacks, later=False, loss=None, report_to=()):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    x, y = data()
    rows = [{"x": a, "labels": b} for a, b in zip(x, y)]
    settings = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=20,
        per_device_eval_batch_size=30,
        num_train_epochs=2,
        logging_steps=1,
        use_cpu=True,
        report_to=list(report_to),
        save_strategy="no",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
    )
    trainer = transformers.Trainer(
        Classifier(),
        settings,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[] if later else callbacks,
        compute_loss_func=loss,
    )
    for callback in callbacks if later else ():
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def loss_outside(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"], labels)


@pytest.mark.parametrize("loss", [None, loss_outside])
@pytest.mark.parametrize("later", [False, True])
def test_the_trainer_of_hugging_face_trains_the_same_in_slices_and_logs_them(tmp_path, loss, later):
    pytest.importorskip("transformers")
    from koila.integrations.transformers import KoilaCallback

    plain = hugging_face(tmp_path, [], loss=loss)
    callback = KoilaCallback()
    with koila.micro_batch(8):
        cut = hugging_face(tmp_path, [callback], later, loss)
        assert koila.last_plan().n_micro_batches == 3 and koila.last_plan().gathers == []
        expected, got = plain.evaluate()["eval_loss"], cut.evaluate()["eval_loss"]
    assert koila.plans()[-1].n_micro_batches == 4  # evaluation is cut too
    assert got == pytest.approx(expected, rel=1e-9) and are_close(plain.model, cut.model)
    logged = [entry for entry in cut.state.log_history if "loss" in entry]
    assert len(logged) == 6
    assert all(e["koila/slices"] == 3 and e["koila/peak_mib"] > 0 for e in logged)
    assert koila._backward.after_step is None
    callback.detach()
    n = koila._core.n_plans()
    cut.evaluate()
    assert koila._core.n_plans() == n


@pytest.mark.parametrize("later", [False, True])
def test_reporters_that_the_trainer_puts_first_see_what_koila_logs(tmp_path, later, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers import trainer

    from koila.integrations.transformers import KoilaCallback

    class Reporter(transformers.TrainerCallback):
        seen, begun = [], 0

        def on_train_begin(self, *given, **named):
            Reporter.begun += 1

        def on_log(self, args, state, control, logs=None, **given):
            Reporter.seen.append(dict(logs))

    class Second(Reporter):
        pass

    def reporters(report_to):
        return [Reporter, Second]

    monkeypatch.setattr(trainer, "get_reporting_integration_callbacks", reporters)
    hugging_face(tmp_path, [])
    assert Reporter.seen and not any("koila/slices" in logs for logs in Reporter.seen)
    Reporter.seen, Reporter.begun = [], 0
    with koila.micro_batch(8):
        cut = hugging_face(tmp_path, [KoilaCallback()], later)
    assert isinstance(cut.callback_handler.callbacks[0], KoilaCallback)
    steps = [logs for logs in Reporter.seen if "loss" in logs]
    assert len(steps) == 12 and Reporter.begun == 2  # both are called, and none twice
    assert all(logs["koila/slices"] == 3 and logs["koila/peak_mib"] > 0 for logs in steps)


def test_tensorboard_gets_what_koila_logs(tmp_path):
    pytest.importorskip("transformers")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from koila.integrations.transformers import KoilaCallback

    with koila.micro_batch(8):
        hugging_face(tmp_path, [KoilaCallback()], report_to=["tensorboard"])
    [file] = tmp_path.rglob("events.out.tfevents*")
    events = reading.EventAccumulator(str(file)).Reload()
    assert [e.value for e in events.Scalars("train/koila/slices")] == [3.0] * 6
    assert len(events.Scalars("train/koila/peak_mib")) == len(events.Scalars("train/loss")) == 6


def test_inputs_of_the_model_may_have_their_batch_elsewhere():
    pytest.importorskip("transformers")
    from koila.integrations.transformers import KoilaCallback

    class Turned(Classifier):
        def forward(self, x, labels=None, scale=None):
            return super().forward(x.T * scale.sum(), labels)

    model, (x, y) = Turned(), data()
    scale = torch.ones(3, dtype=torch.float64)
    model(x.T, labels=y, scale=scale)["loss"].backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    callback = KoilaCallback(batch={"x": 1, "labels": 0})
    callback.attach(model), callback.attach(model)
    with koila.micro_batch(16):
        model(x=x.T, labels=y, scale=scale)["loss"].backward()
    assert koila.last_plan().n_micro_batches == 4
    for p, e in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, e, rtol=1e-10)


# ---- Lightning


def test_lightning_trains_the_same_in_slices_and_logs_them():
    lightning = pytest.importorskip("lightning")
    from koila.integrations.lightning import KoilaCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch):
            self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).double().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(callbacks):
        loader = DataLoader(TensorDataset(*data()), batch_size=20)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            callbacks=callbacks,
        )
        module = Module()
        trainer.fit(module, loader, loader)
        return module, trainer.callback_metrics

    plain, expected = fit([])
    with koila.micro_batch(8):
        cut, got = fit([KoilaCallback()])
        assert koila.last_plan().n_micro_batches == 3
    assert are_close(plain, cut) and got["right"] == expected["right"]
    assert got["koila/slices"] == 3 and got["koila/peak_mib"] > 0
    assert "koila/slices" not in expected and "training_step" not in vars(cut)
    assert koila._backward.after_step is None


# ---- Accelerate


def test_accelerate_trains_the_same_in_slices_and_logs_them():
    accelerate = pytest.importorskip("accelerate")
    from koila.integrations.accelerate import log_steps, prepare

    def fit(prepare, log):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        tracked = []
        accelerator.log = lambda values, step=None: tracked.append(values)
        model, loader = net(), DataLoader(TensorDataset(*data()), batch_size=20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
        listener = log(accelerator)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        if listener:
            listener.remove()
        return model, tracked

    plain, _ = fit(lambda a, *objects: a.prepare(*objects), lambda a: None)
    with koila.micro_batch(8):
        cut, tracked = fit(prepare, log_steps)
    assert are_close(plain, cut)
    assert [t["koila/slices"] for t in tracked] == [3, 3, 3]
    accelerator = accelerate.Accelerator(cpu=True)
    assert isinstance(prepare(accelerator, net()), nn.Module)
