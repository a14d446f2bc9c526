#!/usr/bin/env bash
# A script as people write it: variables with defaults, a sum, comments, the rest of the arguments.
set -xeuo pipefail
HOME_OF_DATA=${HOME_OF_DATA:-/data}
MODEL=${MODEL_OF_TEST:-/models/base}   # the start
LENGTH=1024
OFFLOAD=False

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME_OF_DATA/train.parquet" \
    data.val_files="['$HOME_OF_DATA/test.parquet']" \
    data.train_batch_size=192 data.max_prompt_length=400 \
    data.max_response_length=$((LENGTH * 3)) \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.004 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=$OFFLOAD \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=9 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.55 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='sums' trainer.experiment_name='grpo' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.critic_warmup=0 \
    trainer.save_freq=25 trainer.test_freq=5 trainer.total_epochs=4 "$@"
