"""A progress bar that reads all metrics in every hook, on the main process alone; it must not make the others wait."""

from lightning.pytorch.callbacks import ProgressBar


class MetricReader(ProgressBar):
    """Has no more than Lightning asks of a progress bar."""

    def __init__(self):
        super().__init__()
        self.enabled = True

    def disable(self):
        self.enabled = False

    def read(self, trainer, pl_module, *_, **__):
        if self.enabled:
            self.get_metrics(trainer, pl_module), trainer.callback_metrics, trainer.logged_metrics

    on_train_start = on_train_epoch_start = on_train_batch_start = on_before_optimizer_step = on_train_batch_end = read
    on_validation_start = on_validation_epoch_start = on_validation_batch_start = on_validation_batch_end = read
    on_test_start = on_test_epoch_start = on_test_batch_start = on_test_batch_end = read
    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = read
    on_validation_end = on_test_end = on_train_end = on_fit_end = read
