MODEL_PATH=Qwen/Qwen2.5-3B-Instruct
loss_mode=gspo
clip_ratio_low=0.0003
clip_ratio_high=0.0004
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
SFT_MODEL=$(basename $MODEL_PATH)
exp_name="${loss_mode}-epslow-${clip_ratio_low}-epshigh-${clip_ratio_high}-${SFT_MODEL}-RL"
CKPTS_DIR=/rl/checkpoints/experimental/4b/${loss_mode}/${exp_name}
train_files="['/data/gsm8k/train.parquet']"
test_files="['/data/gsm8k/test.parquet']"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=false algorithm.kl_ctrl.kl_coef=0.0 \
  data.train_files="${train_files}" data.val_files="${test_files}" data.prompt_key=prompt data.truncation=error \
  data.shuffle=true data.filter_overlong_prompts=true data.return_raw_chat=True data.train_batch_size=512 \
  data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
  actor_rollout_ref.model.path="${MODEL_PATH}" actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode} \
  actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.grad_clip=1.0 \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.kl_loss_coef=0.0 actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \
  actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
  actor_rollout_ref.actor.entropy_checkpointing=true actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=true \
  actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 3)) \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.enable_chunked_prefill=true \
  actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 3)) \
  actor_rollout_ref.ref.fsdp_config.param_offload=true actor_rollout_ref.ref.ulysses_sequence_parallel_size=1 \
  reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=false \
  +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 4)) \
  +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  +reward_model.reward_kwargs.overlong_buffer_cfg.log=false +reward_model.reward_kwargs.max_resp_len=${max_response_length} \
  trainer.project_name=RL-GSPO trainer.experiment_name="${exp_name}" trainer.default_local_dir="${CKPTS_DIR}" \
  trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.nnodes="${SLURM_JOB_NUM_NODES}" \
  trainer.val_before_train=false trainer.test_freq=10 trainer.save_freq=10 trainer.total_epochs=10 \
  trainer.total_training_steps=500 trainer.resume_mode=auto trainer.log_val_generations=2 $@
