"""Each mistake gives one short message that names the mistake and the remedy, and never a traceback."""

import re
import shutil

import pytest
import torch
from command_line import write_checkpoint_like
from photos import TINY

from relvit.app.cli import COMMANDS, main
from relvit.app.cli.shipped_configs import shipped_configs
from relvit.app.cli.typed_words import PRECISIONS

FIT = ["fit", "--data=ImageFolderData", "--trainer.max_epochs=1", *TINY]


@pytest.fixture
def copy(photos, tmp_path):
    return shutil.copytree(photos, tmp_path / "photos")


@pytest.fixture
def fit(copy, tmp_path):
    return [*FIT, f"--data.root={copy}", f"--runs={tmp_path / 'runs'}"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model.model=relvit_smal"], r"unknown model 'relvit_smal' \(did you mean 'relvit_small'\?\)"),
        (["--model.model_kwargs.depht=3"], r"'test_relvit' has no argument 'depht' \(did you mean 'depth'\?\)"),
        (["--model.model_kwargs.rel_terms=kx"], r"rel_terms must be .* got 'kx'"),
        (["--trainer.max_epoch=3"], r"unknown option --trainer.max_epoch \(did you mean '--trainer.max_epochs'\?\)"),
        (["--data.img_size=64,96"], r"--data.img_size must be a whole number or a pair such as '\[64,96\]', got 64,96"),
        (["--data.batch_size=many"], "--data.batch_size must be a whole number, got many"),
        (["--data=lists/train.csv"], "must be a kind of data, got lists/train.csv: give class folders by --root DIR"),
        (["--data=test.csv"], "got test.csv: .* a list by --data ImageListData and --data.train, .* or --data.predict"),
        (
            ["--trainer.precision=half"],
            f"--trainer.precision must be one of {', '.join(map(repr, PRECISIONS))}, got half",
        ),
        (["--data=FolderData"], r"unknown data 'FolderData' \(did you mean 'ImageFolderData'\?\)"),
        (["--lr"], "--lr needs a value"),
        (["--trainer.default_root_dir=x"], "--trainer.default_root_dir x: relvit writes runs into another folder"),
        (["--trainer.callbacks=EarlyStoping"], r"callbacks 'EarlyStoping' \(did you mean 'EarlyStopping'\?\); known"),
        (["--trainer.callbacks=EarlyStopping"], "missing: --trainer.callbacks.monitor"),
        (["--model.num_classes=7"], "unknown option --model.num_classes: the data decide it, so leave it out"),
        (["--in_chans=1"], "unknown option --in_chans: the data decide it, so leave it out"),
        (["--channels=1"], "unknown option --channels: the data decide it, so leave it out"),
        (["--model.img_size=20"], r"unknown option --model.img_size \(did you mean '--img_size'\?\)"),
        (["--model.name=x"], r"--model.name: the model is chosen by --model NAME \(in configurations by model.model\)"),
        (["--trainer.logger=mlfow"], r"unknown trainer.logger 'mlfow' \(did you mean 'mlflow'\?\); known: 'wandb', "),
        (["--model.model_kwargs.window_size=7"], r"no argument 'window_size'; help\(relvit\.\S*\) lists its arguments"),
        (["--data.in_chans=1"], "unknown option --data.in_chans; relvit fit --help-all lists the options"),
        (["--data.img_size=20"], "image height 20 is not a multiple of the patch size 8: use 16 or 24"),
        (["--ckpt_path=last"], "no checkpoint at last; give the file, such as runs/RUN/checkpoints/best.ckpt"),
        (["--weights_only=false"], "unknown option --weights_only"),
        (["--model.opt=adamv"], r"unknown optimiser 'adamv' \(did you mean 'adamw?'\?\)"),
        (["--model.opt_kwargs.momentum=0.9"], "optimiser 'adamw' has no argument 'momentum'"),
        (["--patience=0"], "--patience must be 1 or more, got 0"),
        (["--patience=2", "--trainer.limit_val_batches=0"], "--patience 2 has no effect without validations, which"),
        (
            ["--model.reversible=true"],
            "unknown option --model.reversible: arguments of the model itself are --model.model_kwargs.reversible",
        ),
        (
            ["--model.depht=3"],
            "unknown option --model.depht: arguments of the model itself are --model.model_kwargs.depth",
        ),
        (["--model.model_kwargs.reversible=maybe"], "reversible must be True or False, got 'maybe'"),
        (["--data.balance=sampels"], r"--data.balance must be one of .*, got sampels \(did you mean 'sampler'\?\)"),
        (["--model.min_lr=1"], "need 0 <= min_lr <= lr, got min_lr 1.* and lr .*: give a min_lr .* such as 0"),
        (["--model.model_kwargs=3"], "must be name: value pairs, got 3: give --model.model_kwargs.NAME VALUE"),
        (["--trainer.callbacks=nomod.Cls"], "--trainer.callbacks: nomod.Cls: No module named 'nomod'"),
        (
            ["--data=relvit.app.data.Nothing"],
            "relvit.app.data.Nothing: module 'relvit.app.data' has no attribute 'Nothing'",
        ),
        (
            ['--trainer.callbacks={"class_path": "EarlyStopping", "init_args": {"monitr": "x"}}'],
            r"unknown option --trainer.callbacks.monitr \(did you mean '--trainer.callbacks.monitor'\?\)",
        ),
        (
            ['--trainer.callbacks={"class_path": "EarlyStopping", "init_args": 3}'],
            "trainer.callbacks.init_args must be name: value pairs, got 3",
        ),
        (["--config="], "--config needs a value"),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=best"],
            "ModelCheckpoint with filename best would replace the best.ckpt that relvit writes: give it another",
        ),
        (
            ["--data.patch_size=4"],
            "--data.patch_size is for images of native shapes .*: leave it out; the",
        ),
        (["--quiet=perhaps"], "--quiet must be true or false, got perhaps"),
        (["--model.lr.x=3"], "--model.lr must be a number, got a mapping"),
        (["--devices=3x", "--accelerator=cpu"], "--devices must be a number of processes or auto, got 3x"),
        (["--trainer.limit_val_batches=1.5"], "error: You have passed invalid value 1.5 for limit_val_batches"),
    ],
)
def test_options(fit, extra, message, fails):
    assert re.search(message, fails([*fit, *extra]))


def test_key_in_a_config_file(fit, tmp_path, fails):
    config = tmp_path / "config.yaml"
    config.write_text("trainer:\n  max_epoch: 3\n")
    message = fails([*fit, f"--config={config}"])
    assert f"unknown option trainer.max_epoch in {config} (did you mean 'trainer.max_epochs'?)" in message
    # For an option from another library, the hint has the form of names in configurations.
    config.write_text("model:\n  learning_rate: 3\n")
    message = fails([*fit, f"--config={config}"])
    assert f"unknown option model.learning_rate in {config} (did you mean 'model.lr'?)" in message
    for text, message in {
        "root: photos": f"unknown option root in {config}: its name in configurations is data.root",
        "epochs: 3": f"unknown option epochs in {config}: its name in configurations is trainer.max_epochs",
        "model: {in_chans: 4}": f"unknown option model.in_chans in {config}: the data decide it, so leave it out",
        "model: {img_size: 64}": f"unknown option model.img_size in {config}: the data decide it: give data.img_size",
        "ckpt_path: last": f"ckpt_path last in {config} has no effect: take it out of the file, and give --ckpt_path",
        "resume: runs/RUN": f"resume runs/RUN in {config} has no effect: take it out of the file, and give --resume",
        "": f"--config {config}: options go by name, such as 'trainer: {{max_epochs: 10}}', got nothing",
        "trainer: {typo: 3}": f"unknown option trainer.typo in {config}; relvit fit --help-all lists the options",
    }.items():
        config.write_text(text)
        assert message in fails([*fit, f"--config={config}"])
    config.write_text("data: {root: photos}")
    message = fails(["fit", f"--config={config}"])
    assert f"data in {config} must have a class_path, and its options in init_args; known are 'CIFAR100Data'" in message
    # A run that fails before it has written a result leaves no folder.
    assert list(tmp_path.glob("runs/*")) == []


def test_a_config_file_that_is_missing(fit, tmp_path, fails):
    (tmp_path / "folder.yaml").touch()
    message = fails([*fit, f"--config={tmp_path / 'fodler.yaml'}"])
    assert message.endswith("fodler.yaml: No such file or directory (did you mean 'folder.yaml'?)\n")


@pytest.mark.parametrize("name", ["folder", "imagenet_deit_small"])
def test_a_configuration_that_leaves_open_where_the_images_are(name, fails):
    message = fails(["fit", "--config", name])
    assert re.search(r"error: (missing: --root|no data given: give --root DIR)", message)
    assert message.count("\n") == 1


def test_a_name_like_no_configuration_lists_them_all(fails):
    message = fails(["fit", "--config=nope"])
    assert "--config nope: No such file or directory; relvit's configurations are 'bands', 'cifar10', " in message
    assert all(f"'{name}'" in message for name in shipped_configs())
    # With a path or a file ending, the user means a file, so the error lists no configurations of relvit.
    assert "configurations are" not in fails(["fit", "--config=runs/nope"]) + fails(["fit", "--config=nope.yaml"])


def test_the_name_of_a_shipped_configuration_is_found_or_hinted_at(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for wrong in ("digtis", "configs/digits.yaml"):
        assert main(["fit", "--config", wrong]) == 2
        assert f"--config {wrong}: No such file or directory (did you mean 'digits'?)" in capsys.readouterr().err
    assert main(["fit", "--config", "digits", "--print_config"]) == 0
    assert "class_path: relvit.app.data.DigitsData" in capsys.readouterr().out
    # A file of the user is preferred to a shipped configuration of the same name.
    (tmp_path / "digits").write_text("model: {lr: nothing}")
    assert main(["fit", "--config", "digits"]) == 2
    assert "--model.lr" in capsys.readouterr().err


def test_a_device_that_is_missing(fit, tmp_path, fails):
    arguments = [argument for argument in fit if "accelerator" not in argument]
    assert "--accelerator tpu: this machine has auto, cpu" in fails([*arguments, "--accelerator=tpu"])
    assert "this machine has auto, cpu (did you mean 'cpu'?)" in fails([*arguments, "--accelerator=cpux"])
    for missing in ("gpux", "cuda:0", "tpu"):
        assert "did you mean" not in fails([*arguments, f"--accelerator={missing}"])
    assert "invalid strategy name: `strategy='dp'`" in fails([*fit, "--trainer.strategy=dp"])
    assert list(tmp_path.glob("runs/*")) == []


def test_a_folder_beside_a_configuration_without_data_needs_its_kind(fails):
    message = fails(["fit", "--config=reversible", "--root=photos"])
    assert "no kind of data is named: for class folders in --root add --data ImageFolderData" in message


def test_no_data_and_no_checkpoint_and_no_such_command(fails):
    assert "no data given: give --root DIR" in fails(["fit"])
    assert "no data given" in fails(["fit", "--data.img_size=16"])
    assert "no checkpoint given: relvit validate runs/RUN/checkpoints/best.ckpt" in fails(["validate"])
    assert "unknown command 'fti' (did you mean 'fit'?)" in fails(["fti"])
    assert "unknown command 'train' (did you mean 'fit'?)" in fails(["train"])
    assert "unknown option --rot (did you mean '--root'?)" in fails(["fit", "--rot=photos"])
    expected = "--data.val_fraction is for --data NAME: --data ImageFolderData --data.root DIR in the place of --root"
    assert expected in fails(["check-data", ".", "--data.val_fraction=0.2"])


def test_missing_folder(fails):
    message = fails([*FIT, "--data.root=nowhere"])
    assert re.search(r"nowhere is not a folder; give the one that holds train/<class>/<image>.*--data.root", message)


def test_class_of_val_that_train_does_not_have(fit, copy, fails):
    shutil.move(copy / "val" / "owl", copy / "val" / "owls")
    assert re.search(r"val/owls is a class .* \(did you mean 'owl'\?\)", fails(fit))


@pytest.mark.parametrize(("damage", "workers"), [("truncated", 0), ("empty", 1)])
def test_broken_image_is_named(fit, copy, damage, workers, fails):
    broken = copy / "train" / "dog" / "3.jpg"
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    message = fails([*fit, f"--data.num_workers={workers}"])
    assert str(broken) in message
    assert damage in message


def test_checkpoint_of_another_architecture_or_class_count(best, fit, copy, fails):
    best = f"--ckpt_path={best}"
    message = fails(["validate", best, "--model.model=relvit_tiny"])
    assert "was trained with model 'test_relvit', not 'relvit_tiny': drop that option" in message
    message = fails(["validate", best, "--model.model_kwargs.depth=3"])
    assert "was trained with model_kwargs {'depth': 2}, not {'depth': 3}" in message
    message = fails(["validate", best, "--data=DigitsData"])
    assert "'cat'" in message
    # Resuming is refused on data with an additional class, a renamed class, or a missing class.
    shutil.copytree(copy / "train" / "owl", copy / "train" / "yak")
    other = f"was trained on other classes than the data has in {copy}: "
    assert f"{other}'yak' is new; give the classes the names that they had" in fails([*fit, best])
    shutil.rmtree(copy / "train" / "owl")
    assert f"{other}'yak' is new and 'owl' is missing; give the classes" in fails([*fit, best])
    shutil.rmtree(copy / "train" / "yak")
    assert f"{other}'owl' is missing; give the classes the names that they had" in fails([*fit, best])


def test_non_finite_loss_stops_before_the_step(fit, tmp_path, fails):
    message = fails([*fit, "--model.lr=1e30", "--trainer.max_epochs=9", "--model.warmup_epochs=0"], status=1)
    assert re.search(r"the loss is nan at step \d+, in epoch [1-9]\d*: stopped before the optimiser step", message)


def test_checkpoints_and_options_of_other_commands(run, best, fit, tmp_path, fails):
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    last = f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    for arguments, message in (
        (
            ["validate", tmp_path / "foreign.ckpt"],
            "is not a checkpoint of relvit fit or relvit.app.training.ImageClassifier, as it",
        ),
        (["validate", run / "checkpoints"], "checkpoints is a folder; give the checkpoint, such as"),
        (
            [*fit, last, "--lr_find=true", "--trainer.max_epochs=9"],
            "--lr_find is for a new training; a resumed training keeps its learning rate: leave out --lr_find",
        ),
        (
            ["resolutions", best, "--sizes=fast"],
            "--sizes must be values, each a whole number or a pair such as '[64,96]', got fast",
        ),
        (["resolutions", best, "--sizes=[16]", "--data.crop_pct=1"], "--data.crop_pct needs --data NAME"),
    ):
        assert message in fails(arguments)


def test_debug_shows_the_traceback_without_passwords(fit, capsys):
    assert main([*fit, "--model.model=http://user:PASSWORD@host/x?sig=SIGNATURE", "--debug"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "unknown model 'http://host/x'" in shown
    assert "PASSWORD" not in shown
    assert "SIGNATURE" not in shown


def test_help_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_a_size_that_a_model_of_timm_does_not_take(best, tmp_path, fails):
    kwargs = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    best = write_checkpoint_like(best, tmp_path / "best.ckpt", "vit_tiny_patch16_224", kwargs)
    wanted = (
        "vit_tiny_patch16_224 cannot take images of 24 x 24 px (Input height (24) doesn't match model (16)): give "
        "img_size 16 or train it with --model.model_kwargs.dynamic_img_size true\n"
    )
    for command in (
        ["validate", "--data.img_size=24", "--trainer.accelerator=cpu"],
        ["predict", "--data.img_size=24", "--trainer.accelerator=cpu", f"--runs={tmp_path / 'runs'}"],
        ["embed", "--img_size=24", f"--root={tmp_path}", f"--output={tmp_path / 'e.npz'}"],
    ):
        assert fails([*command, f"--ckpt_path={best}"]).endswith(wanted)
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("logger", "module", "package", "install"),
    [
        ("WandbLogger", "wandb._WANDB_AVAILABLE", "wandb", '"relvit[wandb]"'),
        ("MLFlowLogger", "mlflow._MLFLOW_AVAILABLE", "mlflow", '"relvit[mlflow]"'),
        ("CometLogger", "comet._COMET_AVAILABLE", "comet-ml", "comet-ml"),
    ],
)
def test_loggers_whose_package_is_missing(fit, logger, module, package, install, tmp_path, monkeypatch, fails):
    class Missing:
        """Imitate the object that Lightning keeps for a package that is not installed."""

        def __bool__(self):
            return False

        def __str__(self):
            return f"Requirement '{package}>=1.0' not met. HINT: Try running `pip install -U '{package}>=1.0'`"

    monkeypatch.setattr(f"lightning.pytorch.loggers.{module}", Missing())
    message = fails([*fit, f"--trainer.logger={logger}"])
    assert message.endswith(f"error: {logger} needs the package {package}: pip install {install}\n")
    assert not (tmp_path / "runs").exists()
