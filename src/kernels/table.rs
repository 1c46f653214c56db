//! The macro that reads the table of operations in [`kernels`](super). It writes the trait that
//! layers use, the trait that devices implement, and the kernels that are inspected.

/// Writes the traits for the operations of a table. `plain` operations take no workspace.
macro_rules! operations {
    (
        plain { $($name:ident($op:ident $(<$life:lifetime>)?);)* }
        with_workspace { $($name_in:ident($op_in:ident $(<$life_in:lifetime>)?);)* }
    ) => {
        /// The operations that a layer may ask of a device. Each method first checks the shapes and
        /// dtypes of the views. Methods with `scratch` take workspace from it and give it back.
        pub trait Kernels {
            $(
                #[doc = concat!("Computes a [`", stringify!($op), "`].")]
                fn $name $(<$life>)? (&self, op: &$op $(<$life>)?);
            )*
            $(
                #[doc = concat!("Computes a [`", stringify!($op_in), "`].")]
                fn $name_in $(<$life_in>)? (
                    &self,
                    op: &$op_in $(<$life_in>)?,
                    scratch: &Scratch<'_>,
                );
            )*

            /// Computes a [`Custom`] kernel.
            fn custom(&self, op: &Custom<'_>);

            /// Computes an [`UnpackPositive`]. Returns false if a row had more positive numbers
            /// than there was room for; `y` then has no use.
            fn unpack_positive(&self, op: &UnpackPositive) -> bool;

            /// Computes a [`Dispatch`]. Returns the number of rows of each expert; a device that
            /// issues its work is waited for. Without memory each expert has all rows.
            fn dispatch(&self, op: &Dispatch) -> Vec<usize>;

            /// Computes the backward of an activation function, then of the product before it:
            /// `linear.dy` is `activate.dx`. A device may sum `linear.dbias` in the same pass.
            fn activate_linear_backward(
                &self,
                activate: &ActivateBackward,
                linear: &LinearBackward,
                scratch: &Scratch<'_>,
            ) {
                self.activate_backward(activate);
                self.linear_backward(linear, scratch);
            }

            /// Computes products that do not depend on each other. A device may do so at once.
            fn linears(&self, ops: &[Linear]) {
                ops.iter().for_each(|op| self.linear(op));
            }

            /// Computes backwards that do not depend on each other. A device may do so at once.
            fn linears_backward(&self, ops: &[LinearBackward], scratch: &Scratch<'_>) {
                ops.iter().for_each(|op| self.linear_backward(op, scratch));
            }

            /// Adds the rows of several experts in this order. A device may do so in one pass.
            fn combine_experts(&self, ops: &[CombineRows]) {
                ops.iter().for_each(|op| self.combine_rows(op));
            }

            /// Computes a sum and its norm: `norm.x` is `sum.y`, and `norm.y` may be `sum.x`. A
            /// device may do both in one pass.
            fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
                self.residual(sum);
                self.norm(norm);
            }

            /// Computes the last tile's [`Score`], then its [`ScoreBackward`], which reads the
            /// statistics that the score writes. A device may compute the logits once for both.
            fn score_and_backward(
                &self,
                score: &Score,
                op: &ScoreBackward<'_>,
                scratch: &Scratch<'_>,
            ) {
                self.score(score, scratch);
                self.score_backward(op, scratch);
            }
        }

        /// A device that computes every operation. [`Kernels`] follows from it, with the checks.
        pub(crate) trait DeviceKernels:
            $($(for<$life>)? Runs<$op $(<$life>)?> +)*
            $($(for<$life_in>)? RunsIn<$op_in $(<$life_in>)?> +)*
            for<'a> Runs<Custom<'a>>
        {
            /// Computes [`Kernels::unpack_positive`].
            fn unpack_positive(&self, op: &UnpackPositive) -> bool;

            /// Computes [`Kernels::dispatch`].
            fn dispatch(&self, op: &Dispatch) -> Vec<usize>;

            /// Computes [`Kernels::activate_linear_backward`].
            fn activate_linear_backward(
                &self,
                activate: &ActivateBackward,
                linear: &LinearBackward,
                scratch: &Scratch<'_>,
            ) {
                self.run(activate);
                self.run_in(linear, scratch);
            }

            /// Computes [`Kernels::linears`].
            fn linears(&self, ops: &[Linear]) {
                ops.iter().for_each(|op| self.run(op));
            }

            /// Computes [`Kernels::linears_backward`].
            fn linears_backward(&self, ops: &[LinearBackward], scratch: &Scratch<'_>) {
                ops.iter().for_each(|op| self.run_in(op, scratch));
            }

            /// Computes [`Kernels::combine_experts`].
            fn combine_experts(&self, ops: &[CombineRows]) {
                ops.iter().for_each(|op| self.run(op));
            }

            /// Computes [`Kernels::residual_norm`].
            fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
                self.run(sum);
                self.run(norm);
            }

            /// Computes [`Kernels::score_and_backward`].
            fn score_and_backward(
                &self,
                score: &Score,
                op: &ScoreBackward<'_>,
                scratch: &Scratch<'_>,
            ) {
                self.run_in(score, scratch);
                self.run_in(op, scratch);
            }
        }

        $(
            impl $(<$life>)? Named for $op $(<$life>)? {
                fn name(&self) -> &'static str {
                    stringify!($name)
                }
            }
        )*
        $(
            impl $(<$life_in>)? Named for $op_in $(<$life_in>)? {
                fn name(&self) -> &'static str {
                    stringify!($name_in)
                }
            }
        )*

        impl<K: DeviceKernels> Kernels for K {
            $(
                fn $name $(<$life>)? (&self, op: &$op $(<$life>)?) {
                    op.check();
                    self.run(op);
                }
            )*
            $(
                fn $name_in $(<$life_in>)? (
                    &self,
                    op: &$op_in $(<$life_in>)?,
                    scratch: &Scratch<'_>,
                ) {
                    op.check();
                    self.run_in(op, scratch);
                }
            )*

            fn custom(&self, op: &Custom<'_>) {
                self.run(op);
            }

            fn unpack_positive(&self, op: &UnpackPositive) -> bool {
                op.check();
                DeviceKernels::unpack_positive(self, op)
            }

            fn dispatch(&self, op: &Dispatch) -> Vec<usize> {
                op.check();
                DeviceKernels::dispatch(self, op)
            }

            fn activate_linear_backward(
                &self,
                activate: &ActivateBackward,
                linear: &LinearBackward,
                scratch: &Scratch<'_>,
            ) {
                activate.check();
                linear.check();
                assert_eq!(linear.dy, activate.dx, "the product is the one before the function");
                DeviceKernels::activate_linear_backward(self, activate, linear, scratch);
            }

            fn linears(&self, ops: &[Linear]) {
                ops.iter().for_each(KernelOperation::check);
                DeviceKernels::linears(self, ops);
            }

            fn linears_backward(&self, ops: &[LinearBackward], scratch: &Scratch<'_>) {
                ops.iter().for_each(KernelOperation::check);
                DeviceKernels::linears_backward(self, ops, scratch);
            }

            fn combine_experts(&self, ops: &[CombineRows]) {
                ops.iter().for_each(KernelOperation::check);
                DeviceKernels::combine_experts(self, ops);
            }

            fn residual_norm(&self, sum: &Residual<'_>, norm: &Norm) {
                sum.check();
                norm.check();
                assert_eq!(norm.x, sum.y, "the norm is that of the sum");
                DeviceKernels::residual_norm(self, sum, norm);
            }

            fn score_and_backward(
                &self,
                score: &Score,
                op: &ScoreBackward<'_>,
                scratch: &Scratch<'_>,
            ) {
                score.check();
                op.check();
                DeviceKernels::score_and_backward(self, score, op, scratch);
            }
        }

        impl Kernels for Inspected<'_> {
            $(
                fn $name $(<$life>)? (&self, op: &$op $(<$life>)?) {
                    self.kernels.$name(op);
                    self.inspect(op);
                }
            )*
            $(
                fn $name_in $(<$life_in>)? (
                    &self,
                    op: &$op_in $(<$life_in>)?,
                    scratch: &Scratch<'_>,
                ) {
                    self.kernels.$name_in(op, scratch);
                    self.inspect(op);
                }
            )*

            fn custom(&self, op: &Custom<'_>) {
                self.kernels.custom(op);
                self.inspect(op);
            }

            fn unpack_positive(&self, op: &UnpackPositive) -> bool {
                let fits = self.kernels.unpack_positive(op);
                self.inspect(op);
                fits
            }

            fn dispatch(&self, op: &Dispatch) -> Vec<usize> {
                self.kernels.dispatch(op)
            }
        }
    };
}
