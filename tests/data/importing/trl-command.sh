accelerate launch --num_processes 2 train.py \
  --model_name_or_path /models/base --output_dir /runs/trl \
  --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --num_generations 4 \
  --loss_type cispo --epsilon_high 5.0 --lr_scheduler_type constant_with_warmup --warmup_steps 3 \
  --max_steps 50 --save_steps 10 --use_peft --lora_r 8 --lora_target_modules q_proj \
  --gradient_checkpointing --report_to wandb --use_vllm --vllm_importance_sampling_cap 2.0
