"""A script for TRL beside the same training here.

    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir="runs/sums", max_steps=5, learning_rate=1e-2, beta=0.04, num_generations=4,
        max_completion_length=2, per_device_train_batch_size=32, num_iterations=1, epsilon=0.2,
        temperature=1.0, reward_weights=[1.0, 0.5], loss_type="grpo", max_grad_norm=1.0,
    )
    GRPOTrainer(model="…", args=args, train_dataset=DATASET, reward_funcs=[digits, right]).train()

`python -m experiments.examples.from_trl` runs what stands below: rows and reward functions stay.
"""
