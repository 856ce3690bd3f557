"""Callbacks for training frameworks, one module for each. Nothing here is imported unless a program
imports it, so no framework is required. Entry points: `transformers.TransformersCallback`,
`lightning.LightningCallback`, `accelerate.follow_accelerator`, `ray.watch_train_loop`.
"""
