"""koila with the libraries that run training loops, without a change of the model:

- `koila.integrations.transformers.KoilaCallback`, for Hugging Face's Trainer.
- `koila.integrations.lightning.KoilaCallback`, for Lightning's Trainer.
- `koila.integrations.accelerate.prepare`, in place of `accelerator.prepare`.

Each makes the batches lazy and logs slices and peaks. The library is imported with its module here.
"""
